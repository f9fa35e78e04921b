// The simulated devices and the state of the module: what a device owns, what it counted, how it was configured.

#pragma once

#include "hotmoe/sim.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// One device allocation. `fake` is a reserved, inaccessible address range: the device pointers that ggml sees. `real` is
// where the bytes are. The two have a constant distance, so that views and offsets need no translation of their own.
struct sim_alloc {
    uint8_t *             fake  = nullptr;
    uint8_t *             real  = nullptr;
    size_t                size  = 0;       // bytes asked for
    size_t                pages = 0;       // bytes mapped at each of the two
    ggml_backend_buffer_t inner = nullptr; // `real` as a CPU buffer: kernels expect their operands in one
};

struct sim_counters {
    std::atomic<uint64_t> h2d_bytes { 0 }, d2h_bytes { 0 }, d2d_bytes { 0 };
    std::atomic<uint64_t> n_h2d { 0 }, n_d2h { 0 }, n_d2d { 0 };
    std::atomic<uint64_t> n_sync { 0 }, n_graphs { 0 }, n_kernels { 0 };
    std::atomic<uint64_t> n_deferred { 0 }, n_failed { 0 }, n_dup_ids { 0 }, n_late_frees { 0 }, n_faults { 0 };
};

struct sim_device {
    int         index;
    std::string name;
    std::string description;
    size_t      capacity; // bytes

    std::mutex                     mutex;            // guards the four members below
    std::map<uintptr_t, sim_alloc> allocs;           // live allocations by fake address
    std::deque<sim_alloc>          freed;            // fake ranges kept reserved, so that a stale pointer is recognised
    size_t                         allocated = 0;   // bytes
    size_t                         peak      = 0;   // bytes

    sim_counters counters;

    ggml_backend_device      dev;
    ggml_backend_buffer_type buft;
};

struct sim_state {
    std::mutex               mutex; // guards the three members below
    hotmoe_sim_config        config;
    bool                     registered = false;
    std::map<void *, size_t> host_registered; // memory of others that was registered as pinned: address and bytes

    std::atomic<bool>     poison { true };
    std::atomic<uint64_t> host_pinned_limit { 0 }; // bytes, 0 = none
    std::atomic<uint64_t> host_pinned { 0 };       // bytes
    int                   offload_min_batch = 32;

    ggml_backend_reg         reg;
    ggml_backend_buffer_type host_buft;

    std::vector<std::unique_ptr<sim_device>> devices; // fixed once registered

    sim_state();
};

// The one instance. It is never destroyed: backends and buffers may outlive the static destructors.
sim_state & sim();

// Things that take time on a real device.
enum sim_work {
    SIM_WORK_H2D,   // amount: bytes
    SIM_WORK_D2H,   // amount: bytes
    SIM_WORK_D2D,   // amount: bytes
    SIM_WORK_GRAPH, // amount: kernels
    SIM_WORK_SYNC,  // amount: unused
};

// Every copy, graph and synchronisation passes here once, when it is accepted. The only place that counts them.
void sim_charge(sim_device & device, enum sim_work work, uint64_t amount);

// Registers nothing, but fixes the configuration and creates the devices; the same object each time.
ggml_backend_reg_t sim_reg();

// the interface tables, in sim_backend.cpp
extern const ggml_backend_device_i sim_device_iface;
extern const ggml_backend_reg_i    sim_reg_iface;

static inline sim_device & sim_device_of(ggml_backend_dev_t dev) {
    return *(sim_device *) dev->context;
}
