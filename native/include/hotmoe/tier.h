#ifndef HOTMOE_TIER_H
#define HOTMOE_TIER_H

// Tier managers: what host memory keeps of experts that lie in a mapped file. The ABI, the registry of those that go by a
// name, and counters.
//
// Tier 1 are the device's slots, tier 2 is host memory, tier 3 the file. Where experts are mapped from the file, the page cache
// is tier 2, and the system decides what stays in it, page by page. A tier manager knows better: after each step (ubatch) it is
// told which experts were used and which ones tier 2 is to give up, and it answers with requests: read an expert's bytes ahead
// (WILLNEED), or let go of them (DONTNEED).
//
// Which experts tier 2 holds is decided beside it: for each bank the `host_slots` that were used last (all if there is no limit).
// An expert that was not among them when the step began, and is when it ends, has entered; one that has to make room is dropped.
//
// Requests name experts. The cache turns them into byte ranges of all the tensors of the bank, rounds them to pages (WILLNEED
// outward, DONTNEED inward, so that no byte of another expert is let go of), and passes them to the system only if they lie in a
// mapping of a regular file whose pages the file can restore. Unknown experts and other memory are refused and counted. So a bad
// manager can be slow, but not wrong.
//
// Of one object, one function runs at a time, on the thread that evaluates, or that frees the context or the cache, or reads
// the counters. A manager serves all banks of one cache.

#include "base.h"
#include "policy.h"

#ifdef __cplusplus
extern "C" {
#endif

struct hotmoe_cache;

enum {
    HOTMOE_TIER_ABI_VERSION = 1,
};

enum hotmoe_tier_advice {
    HOTMOE_TIER_WILLNEED     = 0, // read it into host memory, without waiting for it
    HOTMOE_TIER_DONTNEED     = 1, // its memory is better used for something else
    HOTMOE_TIER_ADVICE_COUNT = 2,
};

// A bank whose experts lie in host memory, mapped from a file or not.
struct hotmoe_tier_bank {
    int32_t  layer;
    int32_t  bank;         // 0, or 1 for the second bank of a layer that has two
    int32_t  n_expert;
    int32_t  host_slots;   // experts that tier 2 holds at most; n_expert if there is no limit
    uint64_t expert_bytes; // of one expert, all tensors
};

// What a tier manager is made for.
struct hotmoe_tier_config {
    uint32_t                        struct_size; // sizeof(struct hotmoe_tier_config)
    int32_t                         n_banks;
    const struct hotmoe_tier_bank * banks;   // [n_banks]
    const char *                    options; // what stood in parentheses after the name; "" if nothing did
};

struct hotmoe_tier_expert {
    int32_t layer;
    int32_t bank;
    int32_t expert;
    uint8_t entered; // of those that were used: 1 if it was not in tier 2 before this step and is now, else 0
};

struct hotmoe_tier_step {
    uint64_t                          step;     // ubatches of the context so far, this one included
    int32_t                           phase;    // enum hotmoe_phase
    int32_t                           n_tokens; // of the ubatch
    int32_t                           n_used;
    int32_t                           n_dropped;
    const struct hotmoe_tier_expert * used;    // [n_used] distinct, in the order of their first use
    const struct hotmoe_tier_expert * dropped; // [n_dropped] distinct; an expert that was used can be among them
};

struct hotmoe_tier_request {
    int32_t layer;
    int32_t bank;
    int32_t expert;
    int32_t advice; // enum hotmoe_tier_advice
};

struct hotmoe_tier_manager {
    uint32_t struct_size; // sizeof(struct hotmoe_tier_manager) as the manager's author compiled it
    uint32_t abi_version; // HOTMOE_TIER_ABI_VERSION
    void *   context;

    // a step is over: write what is to be done, in this order, to requests, which has room for max_requests. Returns how many,
    // 0 for none; any other value means that it failed, and nothing is done
    int32_t (*on_step)(void * context, const struct hotmoe_tier_step * step, struct hotmoe_tier_request * requests, int32_t max_requests);

    // (optional) forget everything; tier 2 is taken to be empty
    void (*reset)(void * context);

    // (optional) free the context; the last call
    void (*free)(void * context);
};

// ---- by name ----
//
// As for policies (policy.h): a built-in or registered name, with options in parentheses, or "lib:PATH" for a library with
//
//     int32_t hotmoe_tier_entry(const struct hotmoe_tier_config * config, struct hotmoe_tier_manager * out);

typedef int32_t (*hotmoe_tier_create_fn)(void * user_data, const struct hotmoe_tier_config * config, struct hotmoe_tier_manager * out);

HOTMOE_API int32_t      hotmoe_tier_register(const char * name, const char * description, hotmoe_tier_create_fn create, void * user_data);
HOTMOE_API int32_t      hotmoe_tier_unregister(const char * name);
HOTMOE_API int32_t      hotmoe_tier_count(void);
HOTMOE_API const char * hotmoe_tier_name(int32_t i);
HOTMOE_API const char * hotmoe_tier_description(int32_t i);
HOTMOE_API const char * hotmoe_tier_default(void);
HOTMOE_API int32_t      hotmoe_tier_create(const char * name, const struct hotmoe_tier_config * config, struct hotmoe_tier_manager * out);

// ---- of a cache ----

struct hotmoe_tier_counters {
    uint64_t steps;            // that the manager was told of
    uint64_t used;             // experts in them
    uint64_t entered;          // of these, the ones that entered tier 2
    uint64_t dropped;          // experts that tier 2 gave up
    uint64_t failed_steps;     // the manager failed, or the number of its requests was not legal: nothing was done
    uint64_t refused_requests; // with a layer, bank, expert or advice that there is not
    uint64_t refused_ranges;   // one per tensor: not in a mapping of a regular file whose pages the file can restore
    uint64_t calls[HOTMOE_TIER_ADVICE_COUNT];  // ranges that were passed to the system, one per tensor, by advice
    uint64_t bytes[HOTMOE_TIER_ADVICE_COUNT];  // in them: whole pages
    uint64_t errors[HOTMOE_TIER_ADVICE_COUNT]; // of the calls, those in which the system reported an error
    uint64_t advise_ns;        // in the system, in nanoseconds
    uint64_t manager_ns;       // in the manager, in nanoseconds
};

// Name of the tier manager of a cache as it was asked for; "" if it has none.
HOTMOE_API const char * hotmoe_cache_tier_manager(const struct hotmoe_cache * cache);

// Counters since the cache was attached, or its counters were reset. The manager is told of the step before, if it was not
// yet. All zero without a tier manager.
HOTMOE_API int32_t hotmoe_tier_stats(struct hotmoe_cache * cache, struct hotmoe_tier_counters * out);

// The banks that the tier manager serves: their number, and one of them.
HOTMOE_API int32_t hotmoe_tier_n_banks(const struct hotmoe_cache * cache);
HOTMOE_API int32_t hotmoe_tier_get_bank(const struct hotmoe_cache * cache, int32_t i, struct hotmoe_tier_bank * out);

// How much of an expert of bank i of these is in the page cache now: the bytes of those of its pages that it shares with no
// other expert, and of these the ones that are there. HOTMOE_ERR_STATE: the system does not tell.
HOTMOE_API int32_t hotmoe_tier_resident(const struct hotmoe_cache * cache, int32_t i, int32_t expert, uint64_t * bytes, uint64_t * resident);

#ifdef __cplusplus
}
#endif

#endif
