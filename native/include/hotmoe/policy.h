#ifndef HOTMOE_POLICY_H
#define HOTMOE_POLICY_H

// The eviction policy ABI.
//
// A policy ranks; the cache owns the slot map. One policy object serves one bank (the expert tensors of one layer that
// share a routing), so its state is indexed by expert id alone. The cache makes at most one call per function and event,
// with arrays in and arrays out, from the thread that runs llama_decode, never from two threads at once.
//
// An event is what one (ubatch, layer) needs: a set of distinct experts. Events are atomic: candidates for eviction
// never contain an expert of the event itself. The cache validates every answer (range, duplicates, membership) and
// falls back to least recently used for that event if one is wrong, so a bad policy can be slow but not wrong.
//
// Order of calls for one event: on_access, then, if there are more misses than free slots, select_evict, then on_evict
// for the victims and on_load for the experts that got a slot.

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    HOTMOE_POLICY_ABI_VERSION = 1,
};

enum hotmoe_phase {
    HOTMOE_PHASE_DECODE  = 0, // the ubatch holds one token of each of its sequences
    HOTMOE_PHASE_PREFILL = 1, // the ubatch holds more than one token of a sequence
    HOTMOE_PHASE_COUNT   = 2,
};

struct hotmoe_event {
    int32_t         layer;
    int32_t         phase;    // enum hotmoe_phase
    int32_t         n_tokens; // of the ubatch
    int32_t         n_experts;
    uint64_t        step;     // ubatches of the context so far, this one included
    const int32_t * experts;  // [n_experts] distinct expert ids, in the order of their first use
    const uint8_t * hit;      // [n_experts] 1 if the expert was resident when the event began, else 0
};

struct hotmoe_policy {
    uint32_t struct_size; // sizeof(struct hotmoe_policy) as the policy's author compiled it
    uint32_t abi_version; // HOTMOE_POLICY_ABI_VERSION
    void *   context;

    // (optional) the experts of an event are about to be used
    void (*on_access)(void * context, const struct hotmoe_event * event);

    // write the n experts to evict, distinct and taken out of candidates, to victims[n]. n <= n_candidates.
    // Returns n; any other value means that the policy failed
    int32_t (*select_evict)(void * context, const struct hotmoe_event * event, int32_t n,
                            const int32_t * candidates, int32_t n_candidates, int32_t * victims);

    // (optional) n experts lost their slots
    void (*on_evict)(void * context, const struct hotmoe_event * event, int32_t n, const int32_t * experts);

    // (optional) n experts got the slots of the same index
    void (*on_load)(void * context, const struct hotmoe_event * event, int32_t n, const int32_t * experts, const int32_t * slots);

    // (optional) forget everything; all slots are free again
    void (*reset)(void * context);

    // (optional) free the context; the last call
    void (*free)(void * context);
};

// Number of built-in policies, and the name and one-line description of each. NULL if i is out of range.
HOTMOE_API int32_t      hotmoe_policy_count(void);
HOTMOE_API const char * hotmoe_policy_name(int32_t i);
HOTMOE_API const char * hotmoe_policy_description(int32_t i);

// Make a built-in policy for a bank of n_expert experts and n_slots slots.
// HOTMOE_ERR_POLICY: unknown name (the message lists the known ones).
HOTMOE_API int32_t hotmoe_policy_create(const char * name, int32_t n_expert, int32_t n_slots, struct hotmoe_policy * out);

#ifdef __cplusplus
}
#endif

#endif
