// When work runs.
//
// HOTMOE_SIM_STRICT_OFF runs each operation in the call that submits it. The other two modes queue it, and the queues are
// the model of what a device may do: operations of one stream run in order, streams are unordered except where a wait
// says otherwise, and the host knows that something is done only after it has synchronised. There are no threads: queued
// work runs in the thread that makes it necessary (or, in the random mode, in one that passes by), under one lock. Waits
// refer to work submitted earlier, so that running dependencies first always ends.
//
// Copies between host and device read and write host memory when they run, also from pageable memory. CUDA would stage
// pageable memory before it returns, but ggml promises no such thing to callers of the asynchronous functions.

#include "sim_stream.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

struct sim_scheduler {
    std::mutex                mutex; // guards all queues and event tickets, and the members below but the atomics
    std::atomic<int>          mode { HOTMOE_SIM_STRICT_OFF };
    std::atomic<int>          fault { HOTMOE_SIM_FAULT_NONE };
    std::mt19937_64           rng { 1 };
    std::vector<sim_stream *> streams; // open ones
};

static sim_scheduler & scheduler() {
    static sim_scheduler * instance = new sim_scheduler;
    return *instance;
}

// execution

static void sim_run(sim_stream & stream, sim_op & op) {
    switch (op.kind) {
        case SIM_OP_COPY:
            for (size_t i = 0; i < op.n_copies; i++) {
                memmove(op.dst + i * op.stride_dst, op.src + i * op.stride_src, op.size);
            }
            break;
        case SIM_OP_GRAPH: {
            const enum ggml_status status = op.graph->compute(stream.inner, op.n_threads);
            if (status != GGML_STATUS_SUCCESS) {
                stream.device->counters.n_failed++;
                int none = GGML_STATUS_SUCCESS;
                stream.status.compare_exchange_strong(none, status);
            }
        } break;
        case SIM_OP_WAIT:
            break; // met, or the caller would not run it
    }
}

static void sim_run_front(sim_stream & stream) {
    sim_run(stream, stream.queue.front());
    stream.queue.pop_front();
    stream.done++;
}

// Runs the first `ticket` operations of the stream and what they wait for. Needs the lock.
static void sim_run_until(sim_stream & stream, uint64_t ticket) {
    while (stream.done < ticket) {
        const sim_op & op = stream.queue.front();
        if (op.kind == SIM_OP_WAIT) {
            sim_run_until(*op.dep, op.ticket);
        }
        sim_run_front(stream);
    }
}

// Some random legal progress: 0 to 3 operations, none half of the time. Needs the lock.
static void sim_run_some(sim_scheduler & s) {
    if (s.mode != HOTMOE_SIM_STRICT_RANDOM || s.streams.empty() || s.rng() % 2 == 0) {
        return;
    }
    for (uint64_t n = s.rng() % 4; n > 0; n--) {
        sim_stream & stream = *s.streams[s.rng() % s.streams.size()];
        if (stream.queue.empty()) {
            continue;
        }
        const sim_op & op = stream.queue.front();
        if (op.kind == SIM_OP_WAIT && op.dep->done < op.ticket) {
            continue; // blocked
        }
        sim_run_front(stream);
    }
}

static bool sim_fault_strikes(sim_device & device, enum hotmoe_sim_fault fault) {
    if (scheduler().fault != fault) {
        return false;
    }
    device.counters.n_faults++;
    return true;
}

// streams

std::shared_ptr<sim_stream> sim_stream_new(sim_device & device, ggml_backend_t inner) {
    try {
        auto stream    = std::make_shared<sim_stream>();
        stream->device = &device;
        stream->inner  = inner;
        std::lock_guard<std::mutex> lock(scheduler().mutex);
        scheduler().streams.push_back(stream.get());
        return stream;
    } catch (const std::exception &) {
        ggml_backend_free(inner);
        return nullptr;
    }
}

void sim_stream_close(const std::shared_ptr<sim_stream> & stream) {
    sim_scheduler &             s = scheduler();
    std::lock_guard<std::mutex> lock(s.mutex);
    sim_run_until(*stream, stream->issued);
    s.streams.erase(std::remove(s.streams.begin(), s.streams.end(), stream.get()), s.streams.end());
    ggml_backend_free(stream->inner);
    stream->inner = nullptr;
}

void sim_submit(const std::shared_ptr<sim_stream> & stream, sim_op && op) {
    sim_scheduler & s = scheduler();
    if (s.mode != HOTMOE_SIM_STRICT_OFF) {
        std::lock_guard<std::mutex> lock(s.mutex);
        // the mode may have changed while this thread waited for the lock: queueing is right only if something will run it
        if (s.mode != HOTMOE_SIM_STRICT_OFF) {
            stream->queue.push_back(std::move(op));
            stream->issued++;
            stream->device->counters.n_deferred++;
            sim_run_some(s);
            return;
        }
    }
    // without the lock, so that backends in different threads compute at the same time
    sim_run(*stream, op);
}

void sim_synchronize(sim_stream & stream) {
    sim_charge(*stream.device, SIM_WORK_SYNC, 0);
    if (sim_fault_strikes(*stream.device, HOTMOE_SIM_FAULT_DROP_SYNCHRONIZE)) {
        return;
    }
    sim_scheduler &             s = scheduler();
    std::lock_guard<std::mutex> lock(s.mutex);
    sim_run_until(stream, stream.issued);
    sim_run_some(s);
}

// events

void sim_event_record(sim_event & event, const std::shared_ptr<sim_stream> & stream) {
    std::lock_guard<std::mutex> lock(scheduler().mutex);
    event.stream = stream;
    event.ticket = stream->issued;
}

// Needs the lock. A wait counts as issued work, since events recorded after it cover what it waits for.
static void sim_queue_wait(sim_scheduler & s, const std::shared_ptr<sim_stream> & stream, const std::shared_ptr<sim_stream> & dep, uint64_t ticket) {
    if (!dep || dep == stream || dep->done >= ticket) {
        return;
    }
    sim_op op;
    op.kind   = SIM_OP_WAIT;
    op.dep    = dep;
    op.ticket = ticket;
    stream->queue.push_back(std::move(op));
    stream->issued++;
    sim_run_some(s);
}

void sim_event_wait(const std::shared_ptr<sim_stream> & stream, const sim_event & event) {
    if (sim_fault_strikes(*stream->device, HOTMOE_SIM_FAULT_DROP_EVENT_WAIT)) {
        return;
    }
    std::lock_guard<std::mutex> lock(scheduler().mutex);
    sim_queue_wait(scheduler(), stream, event.stream, event.ticket);
}

void sim_copy_wait(const std::shared_ptr<sim_stream> & dst, const std::shared_ptr<sim_stream> & src) {
    if (sim_fault_strikes(*dst->device, HOTMOE_SIM_FAULT_DROP_COPY_WAIT)) {
        return;
    }
    std::lock_guard<std::mutex> lock(scheduler().mutex);
    sim_queue_wait(scheduler(), dst, src, src->issued);
}

void sim_event_synchronize(sim_device & device, const sim_event & event) {
    sim_charge(device, SIM_WORK_SYNC, 0);
    if (sim_fault_strikes(device, HOTMOE_SIM_FAULT_DROP_EVENT_SYNCHRONIZE)) {
        return;
    }
    sim_scheduler &             s = scheduler();
    std::lock_guard<std::mutex> lock(s.mutex);
    if (event.stream) {
        sim_run_until(*event.stream, event.ticket);
    }
    sim_run_some(s);
}

// the rest

void sim_progress() {
    sim_scheduler & s = scheduler();
    if (s.mode == HOTMOE_SIM_STRICT_RANDOM) {
        std::lock_guard<std::mutex> lock(s.mutex);
        sim_run_some(s);
    }
}

static bool sim_overlaps(const void * a, size_t na, const uint8_t * b, size_t nb) {
    return (const uint8_t *) a < b + nb && b < (const uint8_t *) a + na;
}

static bool sim_op_uses(const sim_op & op, const uint8_t * base, size_t size) {
    switch (op.kind) {
        case SIM_OP_COPY:
            return sim_overlaps(op.dst, (op.n_copies - 1) * op.stride_dst + op.size, base, size) ||
                sim_overlaps(op.src, (op.n_copies - 1) * op.stride_src + op.size, base, size);
        case SIM_OP_GRAPH:
            return op.graph->uses(base, size);
        case SIM_OP_WAIT:
            return false;
    }
    return false;
}

bool sim_finish_uses(const uint8_t * base, size_t size) {
    sim_scheduler &             s = scheduler();
    std::lock_guard<std::mutex> lock(s.mutex);

    bool found = false;
    for (sim_stream * stream : s.streams) {
        for (size_t i = stream->queue.size(); i > 0; i--) {
            if (sim_op_uses(stream->queue[i - 1], base, size)) {
                sim_run_until(*stream, stream->done + i);
                found = true;
                break;
            }
        }
    }
    return found;
}

bool sim_set_strict(int mode, uint64_t seed) {
    if (mode < HOTMOE_SIM_STRICT_OFF || mode > HOTMOE_SIM_STRICT_RANDOM) {
        return false;
    }
    sim_scheduler &             s = scheduler();
    std::lock_guard<std::mutex> lock(s.mutex);
    for (sim_stream * stream : s.streams) {
        sim_run_until(*stream, stream->issued);
    }
    s.mode = mode;
    s.rng.seed(seed);
    return true;
}

void sim_set_fault(enum hotmoe_sim_fault fault) {
    scheduler().fault = fault;
}
