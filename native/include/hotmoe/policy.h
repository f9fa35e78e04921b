#ifndef HOTMOE_POLICY_H
#define HOTMOE_POLICY_H

// Eviction policies and admission policies: the ABI, and the registry of those that go by a name.
//
// A policy ranks; the cache owns the slot map. One object serves one bank (the expert tensors of one layer that share a
// routing) in one tier, so its state is indexed by expert id alone. The cache makes at most one call per function and event, with
// arrays in and arrays out, from the thread that runs llama_decode, never from two threads at once.
//
// An event is what one (ubatch, layer) needs: a set of distinct experts; of tier 2, see host_policy in cache.h. Events are atomic: candidates for eviction never
// contain an expert of the event itself, nor one that is pinned. The cache validates every answer (range, duplicates,
// membership) and falls back to least recently used for that event if one is wrong, so a bad policy can be slow but not wrong.
//
// Order of calls for one event: on_access, admit (admission), then, if more slots are needed than are free, select_evict and
// on_evict, then on_load for the experts that got a slot to keep.
//
// The arrays that a function is given are valid during the call. Those of one object lie at the same addresses in all calls.

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    HOTMOE_POLICY_ABI_VERSION = 2,
};

enum hotmoe_phase {
    HOTMOE_PHASE_DECODE  = 0, // the ubatch holds one token of each of its sequences
    HOTMOE_PHASE_PREFILL = 1, // the ubatch holds more than one token of a sequence
    HOTMOE_PHASE_COUNT   = 2,
};

enum {
    HOTMOE_SHARED_LAYER = -1, // layer of a pool that all layers share (replay only); expert ids count through the layers
};

struct hotmoe_event {
    int32_t         layer;
    int32_t         bank;     // 0, or 1 for the second bank of a layer that has two
    int32_t         phase;    // enum hotmoe_phase
    int32_t         n_tokens; // of the ubatch
    int32_t         n_experts;
    uint64_t        step;     // ubatches of the context so far, this one included
    const int32_t * experts;  // [n_experts] distinct expert ids, in the order of their first use
    const uint8_t * hit;      // [n_experts] 1 if the expert was resident when the event began, else 0
    const float *   weights;  // [n_experts] router weights, summed over the tokens of the ubatch; NULL if nobody wants them
                              // (see wants_weights) or the model's graph does not tell
};

// What a policy object is made for.
struct hotmoe_policy_config {
    uint32_t     struct_size; // sizeof(struct hotmoe_policy_config)
    int32_t      layer;       // HOTMOE_SHARED_LAYER: of all layers
    int32_t      bank;
    int32_t      n_expert;
    int32_t      n_slots;
    const char * options;     // what stood in parentheses after the name, for example "half_life=32"; "" if nothing did
};

struct hotmoe_policy {
    uint32_t struct_size; // sizeof(struct hotmoe_policy) as the policy's author compiled it
    uint32_t abi_version; // HOTMOE_POLICY_ABI_VERSION
    void *   context;
    int32_t  wants_weights; // not 0: events carry router weights, which costs one more read-back from the device per event

    // (optional) the experts of an event are about to be used
    void (*on_access)(void * context, const struct hotmoe_event * event);

    // write the n experts to evict, distinct and taken out of candidates, to victims[n]. n <= n_candidates.
    // Returns n; any other value means that the policy failed
    int32_t (*select_evict)(void * context, const struct hotmoe_event * event, int32_t n,
                            const int32_t * candidates, int32_t n_candidates, int32_t * victims);

    // (optional) n ids were answered to select_evict that cannot be evicted, or not twice, and the cache chose instead
    void (*on_refused)(void * context, const struct hotmoe_event * event, int32_t n, const int32_t * victims);

    // (optional) n experts lost their slots. event is NULL if this did not happen in one (the bytes of an expert that was
    // loaded did not arrive)
    void (*on_evict)(void * context, const struct hotmoe_event * event, int32_t n, const int32_t * experts);

    // (optional) n experts got the slots of the same index. Without admission these are the misses of the event
    void (*on_load)(void * context, const struct hotmoe_event * event, int32_t n, const int32_t * experts, const int32_t * slots);

    // (optional) forget everything; all slots are free again
    void (*reset)(void * context);

    // (optional) free the context; the last call
    void (*free)(void * context);
};

// Admission decides whether an expert that missed may keep its slot. Where every miss is copied to the device, an expert
// that is not admitted still gets a slot for the event, but on loan: the slots on loan are the first to be taken again, and
// the eviction policy does not know of them. An expert that is used again while on loan is judged again.
struct hotmoe_admission {
    uint32_t struct_size;
    uint32_t abi_version; // HOTMOE_POLICY_ABI_VERSION
    void *   context;
    int32_t  wants_weights;

    // (optional) as in hotmoe_policy
    void (*on_access)(void * context, const struct hotmoe_event * event);

    // set admitted[i] to 1 if experts[i] may keep its slot, else to 0. experts[n] are those of the event that have none to
    // keep, in the order of the event. Returns n; any other value means that it failed, and all are admitted
    int32_t (*admit)(void * context, const struct hotmoe_event * event, int32_t n, const int32_t * experts, uint8_t * admitted);

    // (optional) n experts, admitted or on loan, lost their slots; event may be NULL
    void (*on_evict)(void * context, const struct hotmoe_event * event, int32_t n, const int32_t * experts);

    // (optional) as in hotmoe_policy
    void (*reset)(void * context);
    void (*free)(void * context);
};

// ---- by name ----
//
// A name is that of a built-in policy or of one that was registered, or "lib:PATH" for a shared library that exports
//
//     int32_t hotmoe_policy_entry(const struct hotmoe_policy_config * config, struct hotmoe_policy * out);
//     int32_t hotmoe_admission_entry(const struct hotmoe_policy_config * config, struct hotmoe_admission * out);
//
// (the one that is asked for), which return HOTMOE_OK and fill in `out`, or another status. A library stays loaded. A name
// may be followed by options in parentheses: "lrfu(half_life=32)", "lib:./mine.so(verbose=1)".

// Makes an object for one bank. user_data is what was registered. Returns HOTMOE_OK or another status.
typedef int32_t (*hotmoe_policy_create_fn)(void * user_data, const struct hotmoe_policy_config * config, struct hotmoe_policy * out);
typedef int32_t (*hotmoe_admission_create_fn)(void * user_data, const struct hotmoe_policy_config * config, struct hotmoe_admission * out);

// Add a name to the registry, which is the process's. HOTMOE_ERR_ARGUMENT: the name is taken, empty, or has "(" or "," in it.
// The strings are copied.
HOTMOE_API int32_t hotmoe_policy_register(const char * name, const char * description, hotmoe_policy_create_fn create, void * user_data);
HOTMOE_API int32_t hotmoe_admission_register(const char * name, const char * description, hotmoe_admission_create_fn create, void * user_data);

// Take a name out of the registry; objects that were made live on. HOTMOE_ERR_ARGUMENT: there is no such name, or it is built in.
HOTMOE_API int32_t hotmoe_policy_unregister(const char * name);
HOTMOE_API int32_t hotmoe_admission_unregister(const char * name);

// Number of names, the built-in ones first; name and one-line description of each, NULL if i is out of range. The strings are
// valid until the name is unregistered.
HOTMOE_API int32_t      hotmoe_policy_count(void);
HOTMOE_API const char * hotmoe_policy_name(int32_t i);
HOTMOE_API const char * hotmoe_policy_description(int32_t i);
HOTMOE_API int32_t      hotmoe_admission_count(void);
HOTMOE_API const char * hotmoe_admission_name(int32_t i);
HOTMOE_API const char * hotmoe_admission_description(int32_t i);

// The names that are used where none is given.
HOTMOE_API const char * hotmoe_policy_default(void);
HOTMOE_API const char * hotmoe_admission_default(void);

// Make an object by name ("name" or "name(options)"; NULL: the default) for a bank; config->options is not looked at.
// HOTMOE_ERR_POLICY: unknown name (the message lists the known ones), wrong options, a library that cannot be loaded or was
// made for another ABI version, or the object could not be made.
HOTMOE_API int32_t hotmoe_policy_create(const char * name, const struct hotmoe_policy_config * config, struct hotmoe_policy * out);
HOTMOE_API int32_t hotmoe_admission_create(const char * name, const struct hotmoe_policy_config * config, struct hotmoe_admission * out);

#ifdef __cplusplus
}
#endif

#endif
