// The simulated accelerator: a ggml backend module with devices SIM0, SIM1, ...
//
// A simulated device has memory of its own that the host cannot address, asynchronous copies, events and the operation
// support of a CUDA device, but computes with ggml's CPU kernels, so its results are real. It exists to test placement,
// residency and synchronisation on machines without a GPU; it says nothing about speed.
//
// The order of calls is: configure (optional), make the devices known to ggml (hotmoe_sim_register(), or
// ggml_backend_load() on this library's path, or GGML_BACKEND_PATH), then use them like any other ggml device.
// Loaded without configuration there is one device of 1 GiB.
//
// Functions return HOTMOE_SIM_OK or a negative code, and hotmoe_sim_last_error() then has the message. All functions
// may be called from any thread.

#ifndef HOTMOE_SIM_H
#define HOTMOE_SIM_H

#include <stdbool.h>
#include <stdint.h>

#if defined(_WIN32)
#    define HOTMOE_SIM_API __declspec(dllexport)
#else
#    define HOTMOE_SIM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define HOTMOE_SIM_MAX_DEVICES 16

// Return codes.
#define HOTMOE_SIM_OK 0
#define HOTMOE_SIM_ERR_ARGUMENT -1 // a value is out of range; the message names the value and the limit
#define HOTMOE_SIM_ERR_BUSY -2 // the devices are registered already and can no longer be configured
#define HOTMOE_SIM_ERR_INTERNAL -3 // out of memory, or ggml refused the module

// When asynchronous work (copies, graphs) runs. All three are legal schedules of the same calls: a program whose
// synchronisation is complete gives the same bytes in each of them.
enum hotmoe_sim_strict {
    HOTMOE_SIM_STRICT_OFF    = 0, // at once, in call order: what a fast device usually looks like; hides missing synchronisation
    HOTMOE_SIM_STRICT_LATE   = 1, // as late as the API allows: only when the host waits for it, or work that it waits for depends on it
    HOTMOE_SIM_STRICT_RANDOM = 2, // at random legal moments, reproducible by the seed if one thread makes all calls
};

// Deliberate defects of the simulator, to prove that a test would notice the same defect in the code under test.
// None of them changes anything in HOTMOE_SIM_STRICT_OFF.
enum hotmoe_sim_fault {
    HOTMOE_SIM_FAULT_NONE                   = 0,
    HOTMOE_SIM_FAULT_DROP_EVENT_WAIT        = 1, // a stream does not wait for the event that it was told to wait for
    HOTMOE_SIM_FAULT_DROP_SYNCHRONIZE       = 2, // synchronising a backend returns without waiting
    HOTMOE_SIM_FAULT_DROP_EVENT_SYNCHRONIZE = 3, // synchronising an event returns without waiting
    HOTMOE_SIM_FAULT_DROP_COPY_WAIT         = 4, // the target stream of a device to device copy does not wait for the copy
};

struct hotmoe_sim_config {
    uint32_t struct_size;        // sizeof(struct hotmoe_sim_config); fields beyond a smaller size keep their defaults
    int32_t  n_devices;          // 1 .. HOTMOE_SIM_MAX_DEVICES; default 1
    uint64_t bytes_per_device;   // capacity of each device in bytes, > 0; default 1 GiB
    uint64_t host_pinned_limit;  // most bytes of pinned host memory, 0 = no limit (default). Beyond it a request for pinned
                                 // memory quietly yields plain CPU memory, which is what CUDA does
    uint64_t seed;               // of HOTMOE_SIM_STRICT_RANDOM; default 1
    int32_t  strict_mode;        // enum hotmoe_sim_strict; default HOTMOE_SIM_STRICT_OFF
    int32_t  offload_min_batch;  // fewest tokens for which an operation on host weights moves to the device; 0 (default) = as
                                 // ggml's GPU backends have it: GGML_OP_OFFLOAD_MIN_BATCH if set, else 32
    bool     poison;             // fill new device and pinned memory with 0xFF bytes (NaN as F32, -1 as I32); default true.
                                 // Poisoned memory is committed memory: switch it off for devices larger than the host's RAM
};

// What a device did since the last reset. Work is counted when it is accepted, so the numbers of one program do not
// depend on the strict mode. Graphs that were refused count in n_failed only.
struct hotmoe_sim_counters {
    uint32_t struct_size;        // in: sizeof(struct hotmoe_sim_counters); no more than this is written
    uint32_t reserved;
    uint64_t h2d_bytes;          // host to this device, bytes
    uint64_t d2h_bytes;          // this device to host, bytes
    uint64_t d2d_bytes;          // from any simulated device to this one, bytes
    uint64_t n_h2d;              // copies, a strided copy counts once
    uint64_t n_d2h;
    uint64_t n_d2d;
    uint64_t n_sync;             // calls that synchronise a backend of this device, or an event of it
    uint64_t n_graphs;           // graphs accepted
    uint64_t n_kernels;          // nodes in them that compute; views and empty tensors do not
    uint64_t n_deferred;         // operations queued by a strict mode instead of run at once; 0 means the mode had no effect
    uint64_t n_failed;           // graphs or copies refused or failed; the log has the reason
    uint64_t n_dup_ids;          // (token, expert) pairs that a MUL_MAT_ID was given twice: harmless here, not on a GPU
    uint64_t n_late_frees;       // buffers freed while queued work still used them (the work is run first, as cudaFree would)
    uint64_t n_faults;           // times that the fault of hotmoe_sim_set_fault() struck
    uint64_t allocated_bytes;    // device memory in use now, bytes
    uint64_t peak_bytes;         // most of it since the last reset, bytes
    uint64_t host_pinned_bytes;  // pinned host memory in use now, bytes; one number for all devices
};

// Fills *config with the defaults and its struct_size.
HOTMOE_SIM_API void hotmoe_sim_default_config(struct hotmoe_sim_config * config);

// Sets the number of devices and their properties. Only before the devices are registered.
HOTMOE_SIM_API int hotmoe_sim_configure(const struct hotmoe_sim_config * config);

// Makes the devices known to ggml's registry. Does nothing if they are already.
HOTMOE_SIM_API int hotmoe_sim_register(void);

// Number of devices that are registered, 0 before registration.
HOTMOE_SIM_API int hotmoe_sim_device_count(void);

// Changes the order of execution (enum hotmoe_sim_strict) after running everything that is queued.
HOTMOE_SIM_API int hotmoe_sim_set_strict(int mode, uint64_t seed);

// Plants a defect (enum hotmoe_sim_fault) or, with HOTMOE_SIM_FAULT_NONE, removes it. Work whose synchronisation was
// dropped still runs at the latest when its backend is freed or the strict mode is set, and then reads and writes the host
// memory it was given: keep that memory alive.
HOTMOE_SIM_API int hotmoe_sim_set_fault(int fault);

// Copies the counters of device dev (0 .. hotmoe_sim_device_count() - 1).
HOTMOE_SIM_API int hotmoe_sim_get_counters(int dev, struct hotmoe_sim_counters * counters);

// Zeroes the counters of device dev; peak_bytes becomes allocated_bytes, what is in use now stays.
HOTMOE_SIM_API int hotmoe_sim_reset_counters(int dev);

// Message of the last failed call in this thread, "" if there was none. Valid until the next failed call in this thread.
HOTMOE_SIM_API const char * hotmoe_sim_last_error(void);

#ifdef __cplusplus
}
#endif

#endif // HOTMOE_SIM_H
