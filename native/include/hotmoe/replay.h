#ifndef HOTMOE_REPLAY_H
#define HOTMOE_REPLAY_H

// Slot maps without a model: the ones that the engine runs, fed with recorded events, and the optimum to compare with.
//
// A replay holds one slot map per pool, each with a policy and an admission object of its own, as a cache holds one per bank.
// Not thread-safe: one thread at a time.

#include "policy.h"

#ifdef __cplusplus
extern "C" {
#endif

struct hotmoe_replay;

enum hotmoe_miss {
    HOTMOE_MISS_COPY = 0, // every miss is copied to a slot; one that is not admitted gets a slot on loan
    HOTMOE_MISS_CPU  = 1, // a miss that is not admitted gets no slot, it is computed where it lies
};

struct hotmoe_replay_params {
    int32_t         n_pools;
    const int32_t * layer;    // [n_pools] what the policies are told, HOTMOE_SHARED_LAYER for a pool that all layers share
    const int32_t * n_expert; // [n_pools]
    const int32_t * n_slots;  // [n_pools]
    const char *    policy;    // as in hotmoe_policy_create; NULL: the default
    const char *    admission; // as in hotmoe_admission_create; NULL: the default
    int32_t         miss;      // enum hotmoe_miss
    const int32_t * bank;      // [n_pools] what the policies are told, NULL: all 0
};

// Events in the order in which they happened; arrays of n, or [n + 1] for offsets.
struct hotmoe_replay_events {
    int64_t          n;
    const int32_t *  pool;
    const int32_t *  phase;    // enum hotmoe_phase
    const int32_t *  n_tokens;
    const uint64_t * step;
    const int64_t *  offsets;  // experts of event i: experts[offsets[i]] to experts[offsets[i + 1] - 1]
    const int32_t *  experts;  // ids, repetitions allowed
    const float *    weights;  // as experts, or NULL; an event whose first weight is NaN has none
};

// What came of each event. Any pointer may be NULL.
struct hotmoe_replay_results {
    int32_t * accesses;  // [n] distinct experts
    int32_t * hits;      // [n] of them resident when the event began
    int32_t * loads;     // [n] copied to a slot
    int32_t * evictions; // [n] experts that lost a slot
    int32_t * fallbacks; // [n] 1 if the policy's or the admission's answer was refused
    int32_t * evicted;   // [sum of evictions] which, event after event; room for as many as events->experts has is enough
};

// HOTMOE_ERR_ARGUMENT, HOTMOE_ERR_POLICY, HOTMOE_ERR_MEMORY.
HOTMOE_API int32_t hotmoe_replay_create(const struct hotmoe_replay_params * params, struct hotmoe_replay ** out);
HOTMOE_API void    hotmoe_replay_free(struct hotmoe_replay * replay);

// Run events. An event with more distinct experts than its pool has slots runs in waves, as many experts at a time as there
// are slots, in the order listed; its hits are those that were resident before the first wave.
// HOTMOE_ERR_ARGUMENT: an id, a pool or a phase is out of range, or pinned experts leave too little room; the events before
// that one have been run.
HOTMOE_API int32_t hotmoe_replay_feed(struct hotmoe_replay * replay, const struct hotmoe_replay_events * events, const struct hotmoe_replay_results * results);

// The slot map of a pool: experts[n_slots], -1 for a free slot. Returns n_slots, or a status. n is the room in experts.
HOTMOE_API int32_t hotmoe_replay_slot_map(const struct hotmoe_replay * replay, int32_t pool, int32_t * experts, int32_t n);

// Forget what is resident in all pools; policies and admission are reset.
HOTMOE_API int32_t hotmoe_replay_reset(struct hotmoe_replay * replay);

// Take an expert's slot away, as when its bytes did not arrive. Returns 1, or 0 if it has no slot.
HOTMOE_API int32_t hotmoe_replay_drop(struct hotmoe_replay * replay, int32_t pool, int32_t expert);

// Keep a resident expert from being evicted until it is unpinned as often as it was pinned. Returns 1, or 0 if it has no slot
// (pin) or no pin (unpin).
HOTMOE_API int32_t hotmoe_replay_pin(struct hotmoe_replay * replay, int32_t pool, int32_t expert);
HOTMOE_API int32_t hotmoe_replay_unpin(struct hotmoe_replay * replay, int32_t pool, int32_t expert);

// Give an expert a slot on loan ahead of its use: a free one, or one that is on loan already; never that of an expert that
// was admitted. Returns 1 if it is resident now, else 0.
HOTMOE_API int32_t hotmoe_replay_prefetch(struct hotmoe_replay * replay, int32_t pool, int32_t expert);

// Belady's optimum with the future known, over pools of n_slots[n_pools] slots. `miss` as above: with HOTMOE_MISS_COPY every miss
// takes a slot, with HOTMOE_MISS_CPU a miss may be left out, and is unless a hit comes of it. What is optimal is the number of
// hits in one phase (enum hotmoe_phase), or in both (-1). Larger events run in waves, too. Of the results, accesses, hits and
// loads are written.
HOTMOE_API int32_t hotmoe_replay_belady(const struct hotmoe_replay_events * events, int32_t n_pools, const int32_t * n_slots,
                                        int32_t miss, int32_t phase, const struct hotmoe_replay_results * results);

#ifdef __cplusplus
}
#endif

#endif
