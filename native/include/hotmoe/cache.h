#ifndef HOTMOE_CACHE_H
#define HOTMOE_CACHE_H

// The expert cache: place expert weights at load, attach a slot pool to a context, read its plan and its counters.
//
//   hotmoe_load_begin(&options);           experts of the models that this thread loads now go where options say
//   ... llama_model_load_from_file, llama_init_from_model ...
//   hotmoe_load_end();
//   hotmoe_cache_attach(ctx, &params, &cache);
//   ... llama_decode as usual ...
//   hotmoe_cache_free(cache);              before or after llama_free(ctx)
//
// A cache belongs to one llama_context. It holds one pool per bank, on the device that runs the layer. Its functions
// must not run at the same time as llama_decode on that context. A cache that is NULL is HOTMOE_ERR_ARGUMENT, or does nothing.

#include "base.h"
#include "policy.h"

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct hotmoe_cache;

enum {
    HOTMOE_ALL_LAYERS = -1,
};

enum hotmoe_store {
    HOTMOE_STORE_MAPPED   = 0, // from the model's file, mapped into memory, or read into it (without mmap)
    HOTMOE_STORE_STREAM   = 1, // they are not loaded: a cache reads them from the file when they are needed. Without a cache that
                             // is attached, a context over such a model computes nothing: llama_decode fails
    HOTMOE_STORE_RESIDENT = 2, // in host memory that the layer's device has pinned, where it offers that; load without mmap
};

struct hotmoe_load_options {
    // experts of the first n layers go to host memory, HOTMOE_ALL_LAYERS: of all. Expert weights that end in host memory
    // for whatever reason are loaded in the file's own layout (never repacked), so that they can be pooled
    int32_t n_cpu_moe;

    // where experts that end in host memory come from: enum hotmoe_store
    int32_t store;

    // HOTMOE_STORE_RESIDENT: bytes that may be pinned (locked, for uploads that do not block); 0: as many as it takes
    uint64_t pinned_bytes;
};

// Apply options to the models that the calling thread loads until hotmoe_load_end().
HOTMOE_API int32_t hotmoe_load_begin(const struct hotmoe_load_options * options);
HOTMOE_API void    hotmoe_load_end(void);

enum hotmoe_direct {
    HOTMOE_DIRECT_AUTO = 0, // past the page cache where that works (O_DIRECT), else buffered, with a warning
    HOTMOE_DIRECT_ON   = 1, // or not at all
    HOTMOE_DIRECT_OFF  = 2, // through the page cache
};

struct hotmoe_cache_params {
    // slots per layer ("32"), bytes per device ("6GiB", "512MiB", "1.5G"), or "auto" (free device memory less headroom).
    // One value serves every device that has memory of its own. Values separated by "/" are for one device each, in the
    // order of their layers, the CPU included if layers run there ("48/64", "6GiB/0"); 0 leaves a device's layers out
    const char * slots;
    const char * policy;    // see hotmoe_policy_create; NULL: the default
    const char * admission; // see hotmoe_admission_create; NULL: the default
    int32_t      io_threads; // readers of streamed experts, 0: the default. Contexts over one model share them: the first decides
    int32_t      direct;     // of streamed experts: enum hotmoe_direct
    int32_t      no_overlap; // of streamed experts that the CPU computes; not 0: do not compute hits while misses are read
    int32_t      strict;    // not 0: fail if any expert bank has to be left out, instead of a warning
    int32_t      record;    // not 0: keep the routing of every token for hotmoe_trace_take. With slots "0" there is no pool,
                            // and experts may lie anywhere
    const char * tier_manager; // see tier.h; NULL or "none": off. With slots "0" as for record
    const char * host_slots;   // experts of each layer that host memory is to hold: a number ("32", "32s"), bytes of all layers
                               // together ("24GiB"), or "auto" (what the machine and its cgroups leave, less some headroom).
                               // Streamed experts: NULL, "" or "0" mean "auto"; where the CPU computes them, this is the pool.
                               // For the tier manager of mapped ones: NULL, "" or "0" mean no limit, "auto" is not known
    const char * host_policy;    // of tier 2, which is what streamed experts have in host memory behind a device's slots: as policy
    const char * host_admission; // as admission. Without a tier 2 both must be NULL. The objects of tier 2 are made for host_slots
                                 // slots; their events are what the device missed, and, as hits, experts that have just lost
                                 // their slot on the device while host memory has them (of these without router weights)
};

// Attach a cache to a context. On success *out owns the pools; the plan has been logged at INFO.
// HOTMOE_ERR_ARGUMENT: malformed size, or a policy or admission of a tier 2 that there is not. HOTMOE_ERR_POLICY: no such policy,
// admission or tier manager. HOTMOE_ERR_PLAN: a size below the minimum, nothing to pool, or (strict) a bank that cannot be pooled.
// HOTMOE_ERR_MEMORY: the pool, or the compute buffers that the graphs need beside it, do not fit on the device; "auto" asks for
// less until they do.
// HOTMOE_ERR_STATE: the context has a cache already.
HOTMOE_API int32_t hotmoe_cache_attach(struct llama_context * ctx, const struct hotmoe_cache_params * params, struct hotmoe_cache ** out);

// Detach from the context, if that still lives, and free the pools. NULL is allowed.
HOTMOE_API void hotmoe_cache_free(struct hotmoe_cache * cache);

// Forget what is resident; the pools stay.
HOTMOE_API int32_t hotmoe_cache_clear(struct hotmoe_cache * cache);

// ---- plan ----

enum hotmoe_bank_state {
    HOTMOE_BANK_POOLED   = 0,
    HOTMOE_BANK_LEFT_OUT = 1, // stays on the stock path; `reason` says why
};

// One bank: what the sizing decided for it.
struct hotmoe_plan_bank {
    int32_t  layer;
    int32_t  bank;          // 0, or 1 for the second bank of a layer that has two
    int32_t  state;         // enum hotmoe_bank_state
    int32_t  n_expert;
    int32_t  n_expert_used; // experts per token, as the model's metadata says
    int32_t  n_slots;       // 0 if left out
    int32_t  n_tensors;     // expert tensors that share the slot map
    uint64_t expert_bytes;  // of one expert, all tensors
    uint64_t pool_bytes;    // allocated on the device, tables and padding included
    uint64_t pinned_bytes;  // of its experts, in host memory that the device has pinned
    int32_t  streamed;      // not 0: its experts are read from the file
    int32_t  host_slots;    // tier 2 of a streamed bank whose pool is on a device with memory of its own, else 0
    uint64_t host_bytes;    // of those
    char     device[64];
    char     reason[192];   // "" if pooled
};

// One device: what was asked of it and what it holds.
struct hotmoe_plan_device {
    char     device[64];
    char     requested[32];   // the size as it was given
    int32_t  n_banks;         // pooled
    int32_t  host_memory;     // not 0: the device computes from host memory, a pool there saves no transfer
    uint64_t pool_bytes;
    uint64_t free_bytes;      // before the pool was allocated; of host memory, without what the context has yet to touch
    uint64_t headroom_bytes;  // kept free by "auto", else 0
};

// What the model, its context and this cache take of host memory, in bytes. All but `mapped_bytes` is memory of the process
// that can be swapped at best. The weights are those of the model: contexts over one model share them.
struct hotmoe_plan_host {
    uint64_t slot_bytes;     // slots: pools of devices that compute from host memory, and host slots behind those of others
    uint64_t weight_bytes;   // weights that were read into host memory: all but streamed and mapped ones
    uint64_t context_bytes;  // KV cache or recurrent state, and the outputs of one token per sequence
    uint64_t compute_bytes;  // buffers of the graphs, for the largest ubatch, and what the CPU's kernels work in
    uint64_t wave_bytes;     // to collect results in waves, where a device that computes from host memory runs waves
    uint64_t reader_bytes;   // the readers' own buffers, at most
    uint64_t total_bytes;    // the sum of those above
    uint64_t mapped_bytes;   // besides, weights mapped from the file: page cache, which the system takes back when it needs to
    uint64_t headroom_bytes; // besides, kept free by host_slots "auto": a twentieth of the memory (of the machine, or of its
                             // cgroup), 64 MiB at least; else 0
};

HOTMOE_API int32_t      hotmoe_plan_n_banks(const struct hotmoe_cache * cache);
HOTMOE_API int32_t      hotmoe_plan_n_devices(const struct hotmoe_cache * cache);
HOTMOE_API int32_t      hotmoe_plan_get_bank(const struct hotmoe_cache * cache, int32_t i, struct hotmoe_plan_bank * out);
HOTMOE_API int32_t      hotmoe_plan_get_device(const struct hotmoe_cache * cache, int32_t i, struct hotmoe_plan_device * out);
HOTMOE_API int32_t      hotmoe_plan_get_host(const struct hotmoe_cache * cache, struct hotmoe_plan_host * out);
HOTMOE_API const char * hotmoe_cache_policy(const struct hotmoe_cache * cache);
HOTMOE_API const char * hotmoe_cache_admission(const struct hotmoe_cache * cache);
HOTMOE_API const char * hotmoe_cache_host_policy(const struct hotmoe_cache * cache); // "" without a tier 2, as the next
HOTMOE_API const char * hotmoe_cache_host_admission(const struct hotmoe_cache * cache);

// ---- counters ----

enum hotmoe_bypass {
    HOTMOE_BYPASS_TOO_FEW_SLOTS = 0, // the ubatch may need more experts than there are slots
    HOTMOE_BYPASS_WARMUP        = 1, // warm-up activates all experts
    HOTMOE_BYPASS_CB_EVAL       = 2, // an eval callback reads expert ids
    HOTMOE_BYPASS_COUNT         = 3,
};

HOTMOE_API const char * hotmoe_bypass_name(int32_t reason);

struct hotmoe_counters {
    uint64_t events;
    uint64_t hits;             // distinct experts of an event that were resident when it began
    uint64_t misses;           // distinct experts of an event that were not
    uint64_t evictions;
    uint64_t uploads;          // copies queued, one per expert tensor
    uint64_t uploaded_bytes;
    uint64_t not_admitted;     // experts of an event that had or got a slot on loan
    uint64_t policy_fallbacks; // events in which an answer of the policy or the admission was refused
    uint64_t waves;            // parts in which events were computed that need more experts than there are slots
    uint64_t wait_ns;          // until the ids were there, in nanoseconds: the device's time as much as ours
    uint64_t hook_ns;          // all other time in the hook, in nanoseconds
    uint64_t bypassed[HOTMOE_BYPASS_COUNT]; // events that took the stock path, by reason
};

struct hotmoe_step_counters {
    uint64_t steps;            // ubatches, warm-up left out
    uint64_t tokens;
    uint64_t graphs_built;     // steps that could not reuse the previous graph
    uint64_t bypassed[HOTMOE_BYPASS_COUNT]; // steps with at least one bypassed event, by reason
};

// Counters of bank i of the plan, or of all banks (i = -1), in one phase or in both (phase = -1). Warm-up is left out,
// except that it is counted under HOTMOE_BYPASS_WARMUP.
HOTMOE_API int32_t hotmoe_cache_stats(const struct hotmoe_cache * cache, int32_t i, int32_t phase, struct hotmoe_counters * out);
HOTMOE_API int32_t hotmoe_cache_step_stats(const struct hotmoe_cache * cache, int32_t phase, struct hotmoe_step_counters * out);
HOTMOE_API void    hotmoe_cache_reset_stats(struct hotmoe_cache * cache);

// Reading of streamed experts, since the cache was attached or its counters reset. Readers are shared by the contexts over a
// model: their counters count for all.
struct hotmoe_store_counters {
    uint64_t host_hits;      // looked up in tier 2 (a device missed them) and found
    uint64_t host_misses;
    uint64_t host_evictions;
    uint64_t host_not_admitted;     // looked up, and found or put into a slot on loan
    uint64_t host_policy_fallbacks; // times that an answer of tier 2's policy or admission was refused
    uint64_t reads;          // calls to the system
    uint64_t bytes;          // of experts that arrived
    uint64_t disk_bytes;     // what the system read for it: direct_bytes + buffered_bytes
    uint64_t direct_bytes;   // past the page cache
    uint64_t buffered_bytes;
    uint64_t retries;
    uint64_t errors;         // reads that failed for good
    uint64_t read_ns;        // inside of reads, in nanoseconds, summed over the readers
    uint64_t wait_ns;        // the evaluation stood still for reads, in nanoseconds
};

// All zero if nothing is streamed.
HOTMOE_API int32_t hotmoe_cache_store_stats(const struct hotmoe_cache * cache, struct hotmoe_store_counters * out);

// Why llama_decode failed, if it did because experts could not be read: names file, offset and expert. "" otherwise. Taken once.
// Valid until the next call.
HOTMOE_API const char * hotmoe_cache_take_store_error(struct hotmoe_cache * cache);

// Why files are not read past the page cache though that was not switched off; "" if they are.
HOTMOE_API const char * hotmoe_cache_store_warning(const struct hotmoe_cache * cache);

// ---- trace ----
//
// With `record`, the routing of every layer and token is kept in memory until it is taken, 4 or 8 bytes per expert used
// (8 with router weights). Warm-up and ubatches under an eval callback are not recorded.

// One (ubatch, layer): n_tokens rows of n_used expert ids.
struct hotmoe_trace_event {
    uint64_t step;        // ubatches of the context so far, this one included
    int32_t  layer;
    int32_t  bank;
    int32_t  phase;       // enum hotmoe_phase
    int32_t  n_tokens;
    int32_t  n_used;      // experts per token
    int32_t  has_weights; // 0: the model's graph does not tell its router weights
};

// What waits to be taken.
HOTMOE_API int32_t hotmoe_trace_size(const struct hotmoe_cache * cache, int64_t * n_events, int64_t * n_ids);

// Copy it, in the order in which it happened, and forget it. ids and weights [n_ids]: token after token of event after event, a
// token's experts in the model's order, usually the largest weight first; weights are NaN where there are none.
// HOTMOE_ERR_ARGUMENT: n_events or n_ids is not what hotmoe_trace_size says; HOTMOE_ERR_STATE: nothing is recorded.
HOTMOE_API int32_t hotmoe_trace_take(struct hotmoe_cache * cache, struct hotmoe_trace_event * events, int64_t n_events,
                                     int32_t * ids, float * weights, int64_t n_ids);

// The slot map of bank i: experts[n_slots], -1 for a free slot. Returns n_slots, or a status.
// n is the room in experts; HOTMOE_ERR_ARGUMENT if it is too small.
HOTMOE_API int32_t hotmoe_cache_slot_map(const struct hotmoe_cache * cache, int32_t i, int32_t * experts, int32_t n);

#ifdef __cplusplus
}
#endif

#endif
