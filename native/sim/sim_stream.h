// Streams: each backend instance is one. Work is submitted in order; when it runs depends on the strict mode.

#pragma once

#include "sim_device.h"
#include "sim_graph.h"

#include <deque>
#include <memory>

struct sim_stream;

enum sim_op_kind {
    SIM_OP_COPY,
    SIM_OP_GRAPH,
    SIM_OP_WAIT,
};

struct sim_op {
    enum sim_op_kind kind;

    // SIM_OP_COPY: n_copies runs of size bytes each, all addresses real
    uint8_t *       dst        = nullptr;
    const uint8_t * src        = nullptr;
    size_t          size       = 0;
    size_t          n_copies   = 1;
    size_t          stride_dst = 0;
    size_t          stride_src = 0;

    // SIM_OP_GRAPH
    std::unique_ptr<sim_graph> graph;
    int                        n_threads = 0; // as it was when the graph was submitted

    // SIM_OP_WAIT: until the first `ticket` operations of `dep` are done
    std::shared_ptr<sim_stream> dep;
    uint64_t                    ticket = 0;
};

struct sim_stream {
    sim_device *   device;
    ggml_backend_t inner; // the CPU backend whose kernels do the work

    std::deque<sim_op> queue;
    uint64_t           issued = 0; // operations that have been queued
    uint64_t           done   = 0; // of these, operations that have run

    // First failure of work that had been accepted. A failure of late work cannot be returned by the call that submitted it,
    // so the next graph on this stream reports it.
    std::atomic<int> status { GGML_STATUS_SUCCESS };
};

// A point in a stream; empty until it is recorded.
struct sim_event {
    std::shared_ptr<sim_stream> stream;
    uint64_t                    ticket = 0;
};

// Takes ownership of `inner`. NULL if out of memory.
std::shared_ptr<sim_stream> sim_stream_new(sim_device & device, ggml_backend_t inner);

// Runs what is queued and frees the CPU backend. Events of the stream stay valid, and count as reached.
void sim_stream_close(const std::shared_ptr<sim_stream> & stream);

// Runs or queues one operation, as the strict mode says.
void sim_submit(const std::shared_ptr<sim_stream> & stream, sim_op && op);

void sim_synchronize(sim_stream & stream);

void sim_event_record(sim_event & event, const std::shared_ptr<sim_stream> & stream);
void sim_event_wait(const std::shared_ptr<sim_stream> & stream, const sim_event & event);
void sim_event_synchronize(sim_device & device, const sim_event & event);

// Makes dst wait for everything submitted to src so far, as the last part of a device to device copy.
void sim_copy_wait(const std::shared_ptr<sim_stream> & dst, const std::shared_ptr<sim_stream> & src);

// Lets queued work make progress in HOTMOE_SIM_STRICT_RANDOM; called where the host touches device memory.
void sim_progress();

// Runs queued work up to its last use of the real memory [base, base + size); true if there was any.
bool sim_finish_uses(const uint8_t * base, size_t size);

// False if there is no such mode.
bool sim_set_strict(int mode, uint64_t seed);

void sim_set_fault(enum hotmoe_sim_fault fault);
