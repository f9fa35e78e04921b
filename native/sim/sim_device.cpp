// Configuration, counters and the public C functions.

#include "sim_device.h"

#include "sim_memory.h"
#include "sim_stream.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

static thread_local char sim_error[256];

static int sim_fail(int code, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(sim_error, sizeof(sim_error), fmt, args);
    va_end(args);
    return code;
}

static hotmoe_sim_config sim_default_config() {
    hotmoe_sim_config config = {};
    config.struct_size       = sizeof(config);
    config.n_devices         = 1;
    config.bytes_per_device  = 1ull << 30;
    config.host_pinned_limit = 0;
    config.seed              = 1;
    config.strict_mode       = HOTMOE_SIM_STRICT_OFF;
    config.offload_min_batch = 0;
    config.poison            = true;
    return config;
}

sim_state::sim_state() : config(sim_default_config()), reg {}, host_buft {} {}

sim_state & sim() {
    static sim_state * state = new sim_state;
    return *state;
}

void sim_charge(sim_device & device, enum sim_work work, uint64_t amount) {
    sim_counters & c = device.counters;
    switch (work) {
        case SIM_WORK_H2D:
            c.n_h2d++;
            c.h2d_bytes += amount;
            break;
        case SIM_WORK_D2H:
            c.n_d2h++;
            c.d2h_bytes += amount;
            break;
        case SIM_WORK_D2D:
            c.n_d2d++;
            c.d2d_bytes += amount;
            break;
        case SIM_WORK_GRAPH:
            c.n_graphs++;
            c.n_kernels += amount;
            break;
        case SIM_WORK_SYNC: c.n_sync++; break;
    }
}

ggml_backend_reg_t sim_reg() {
    sim_state &                 state = sim();
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.registered) {
        return &state.reg;
    }

    const hotmoe_sim_config & config = state.config;

    state.poison            = config.poison;
    state.host_pinned_limit = config.host_pinned_limit;
    state.offload_min_batch = config.offload_min_batch;
    if (state.offload_min_batch == 0) {
        // ggml's own variable, read here because every GPU backend of ggml reads it and a simulated one is to decide alike
        const char * env        = getenv("GGML_OP_OFFLOAD_MIN_BATCH");
        state.offload_min_batch = env ? atoi(env) : 32;
    }

    state.reg.api_version = GGML_BACKEND_API_VERSION;
    state.reg.iface       = sim_reg_iface;
    state.reg.context     = nullptr;

    state.devices.clear();
    for (int i = 0; i < config.n_devices; i++) {
        auto device         = std::make_unique<sim_device>();
        device->index       = i;
        device->name        = "SIM" + std::to_string(i);
        device->description = "simulated accelerator, computes on the CPU";
        device->capacity    = config.bytes_per_device;
        device->dev.iface   = sim_device_iface;
        device->dev.reg     = &state.reg;
        device->dev.context = device.get();
        sim_init_buffer_type(*device);
        state.devices.push_back(std::move(device));
    }
    sim_init_host_buffer_type(state.host_buft, &state.devices[0]->dev);

    state.registered = true;
    return &state.reg;
}

// Entry points that ggml_backend_load() looks up. ggml defines macros for them, which are empty unless all backends are
// built as modules; this one is a module always.
extern "C" {
HOTMOE_SIM_API ggml_backend_reg_t ggml_backend_init(void);
HOTMOE_SIM_API int                ggml_backend_score(void);
}

ggml_backend_reg_t ggml_backend_init(void) {
    try {
        return sim_reg();
    } catch (const std::exception & e) {
        GGML_LOG_ERROR("sim: %s\n", e.what());
        return nullptr;
    }
}

int ggml_backend_score(void) {
    return 1;
}

// public functions

void hotmoe_sim_default_config(struct hotmoe_sim_config * config) {
    if (config) {
        *config = sim_default_config();
    }
}

int hotmoe_sim_configure(const struct hotmoe_sim_config * config) {
    if (!config) {
        return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "config is NULL");
    }
    if (config->struct_size < sizeof(uint32_t) || config->struct_size > sizeof(hotmoe_sim_config)) {
        return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "config.struct_size is %u, this library knows sizes up to %zu: set it to "
                                                 "sizeof(struct hotmoe_sim_config) of a matching header",
                        config->struct_size, sizeof(hotmoe_sim_config));
    }

    hotmoe_sim_config merged = sim_default_config();
    memcpy(&merged, config, config->struct_size);
    merged.struct_size = sizeof(merged);

    if (merged.n_devices < 1 || merged.n_devices > HOTMOE_SIM_MAX_DEVICES) {
        return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "n_devices is %d, it must be 1 to %d", merged.n_devices, HOTMOE_SIM_MAX_DEVICES);
    }
    if (merged.bytes_per_device == 0) {
        return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "bytes_per_device is 0, a device needs memory");
    }
    if (merged.offload_min_batch < 0) {
        return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "offload_min_batch is %d, it must be 0 (default) or more", merged.offload_min_batch);
    }

    try {
        std::lock_guard<std::mutex> lock(sim().mutex);
        if (sim().registered) {
            return sim_fail(HOTMOE_SIM_ERR_BUSY, "the simulated devices are registered already: configure before loading the module");
        }
        if (!sim_set_strict(merged.strict_mode, merged.seed)) {
            return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "strict_mode is %d, it must be 0, 1 or 2", merged.strict_mode);
        }
        sim().config = merged;
    } catch (const std::exception & e) {
        return sim_fail(HOTMOE_SIM_ERR_INTERNAL, "%s", e.what());
    }
    return HOTMOE_SIM_OK;
}

int hotmoe_sim_register(void) {
    try {
        ggml_backend_reg_t reg = sim_reg();
        for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
            if (ggml_backend_reg_get(i) == reg) {
                return HOTMOE_SIM_OK;
            }
        }
        ggml_backend_register(reg);
    } catch (const std::exception & e) {
        return sim_fail(HOTMOE_SIM_ERR_INTERNAL, "%s", e.what());
    }
    return HOTMOE_SIM_OK;
}

int hotmoe_sim_device_count(void) {
    std::lock_guard<std::mutex> lock(sim().mutex);
    return sim().registered ? (int) sim().devices.size() : 0;
}

int hotmoe_sim_set_strict(int mode, uint64_t seed) {
    try {
        if (!sim_set_strict(mode, seed)) {
            return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "strict mode is %d, it must be 0, 1 or 2", mode);
        }
    } catch (const std::exception & e) {
        return sim_fail(HOTMOE_SIM_ERR_INTERNAL, "%s", e.what());
    }
    return HOTMOE_SIM_OK;
}

int hotmoe_sim_set_fault(int fault) {
    if (fault < HOTMOE_SIM_FAULT_NONE || fault > HOTMOE_SIM_FAULT_DROP_COPY_WAIT) {
        return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "fault is %d, it must be 0 to %d", fault, HOTMOE_SIM_FAULT_DROP_COPY_WAIT);
    }
    sim_set_fault((enum hotmoe_sim_fault) fault);
    return HOTMOE_SIM_OK;
}

static sim_device * sim_device_by_index(int dev) {
    const int n_devices = hotmoe_sim_device_count();
    if (dev < 0 || dev >= n_devices) {
        sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "device is %d, there are %d simulated devices", dev, n_devices);
        return nullptr;
    }
    return sim().devices[dev].get();
}

int hotmoe_sim_get_counters(int dev, struct hotmoe_sim_counters * counters) {
    sim_device * device = sim_device_by_index(dev);
    if (!device) {
        return HOTMOE_SIM_ERR_ARGUMENT;
    }
    if (!counters || counters->struct_size < sizeof(uint32_t)) {
        return sim_fail(HOTMOE_SIM_ERR_ARGUMENT, "counters is NULL or its struct_size is not set");
    }

    const sim_counters & c = device->counters;

    hotmoe_sim_counters out = {};
    out.struct_size         = counters->struct_size;
    out.h2d_bytes           = c.h2d_bytes;
    out.d2h_bytes           = c.d2h_bytes;
    out.d2d_bytes           = c.d2d_bytes;
    out.n_h2d               = c.n_h2d;
    out.n_d2h               = c.n_d2h;
    out.n_d2d               = c.n_d2d;
    out.n_sync              = c.n_sync;
    out.n_graphs            = c.n_graphs;
    out.n_kernels           = c.n_kernels;
    out.n_deferred          = c.n_deferred;
    out.n_failed            = c.n_failed;
    out.n_dup_ids           = c.n_dup_ids;
    out.n_late_frees        = c.n_late_frees;
    out.n_faults            = c.n_faults;
    out.host_pinned_bytes   = sim().host_pinned;
    {
        std::lock_guard<std::mutex> lock(device->mutex);
        out.allocated_bytes = device->allocated;
        out.peak_bytes      = device->peak;
    }

    memcpy(counters, &out, std::min<size_t>(counters->struct_size, sizeof(out)));
    return HOTMOE_SIM_OK;
}

int hotmoe_sim_reset_counters(int dev) {
    sim_device * device = sim_device_by_index(dev);
    if (!device) {
        return HOTMOE_SIM_ERR_ARGUMENT;
    }
    sim_counters & c = device->counters;
    for (std::atomic<uint64_t> * v : { &c.h2d_bytes, &c.d2h_bytes, &c.d2d_bytes, &c.n_h2d, &c.n_d2h, &c.n_d2d, &c.n_sync,
                                       &c.n_graphs, &c.n_kernels, &c.n_deferred, &c.n_failed, &c.n_dup_ids, &c.n_late_frees, &c.n_faults }) {
        *v = 0;
    }
    std::lock_guard<std::mutex> lock(device->mutex);
    device->peak = device->allocated;
    return HOTMOE_SIM_OK;
}

const char * hotmoe_sim_last_error(void) {
    return sim_error;
}
