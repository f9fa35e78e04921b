#ifndef HOTMOE_TESTING_H
#define HOTMOE_TESTING_H

// For tests only: break the cache on purpose, to show that the tests would notice, and look inside a slot.

#include "cache.h"
#include "tier.h"

#ifdef __cplusplus
extern "C" {
#endif

enum hotmoe_fault {
    HOTMOE_FAULT_NONE        = 0,
    HOTMOE_FAULT_STALE_TABLE = 1, // the table is written after the event instead of before it
    HOTMOE_FAULT_SLOT_MAP    = 2, // two resident experts are swapped in the table
    HOTMOE_FAULT_PROTECTION  = 3, // an event's own experts may be evicted by it
    HOTMOE_FAULT_NO_UPLOAD   = 4, // a missed expert gets a slot, but its bytes are not copied
    HOTMOE_FAULT_NO_WAIT     = 5, // the ids are used without waiting for the read-back
    HOTMOE_FAULT_STATUS      = 6, // every event fails

    // of streamed experts
    HOTMOE_FAULT_WAVE_ROWS   = 7,  // what a wave computes beside its pairs is merged
    HOTMOE_FAULT_WAVE_SLOTS  = 8,  // experts are taken from the slot after theirs
    HOTMOE_FAULT_WAVE_TABLE  = 9,  // the table does not learn what waves load
    HOTMOE_FAULT_REUSE_EARLY = 10, // experts are read into slots whose expert is not computed yet
    HOTMOE_FAULT_WAVE_ORDER  = 11, // what is resident has no precedence
    HOTMOE_FAULT_READ_LOST   = 12, // reads are given up, and taken for done
    HOTMOE_FAULT_TIER2_REUSE = 13, // host slots are filled anew before what was queued from them has left
};

HOTMOE_API void hotmoe_testing_set_fault(struct hotmoe_cache * cache, int32_t fault);

// Read `size` bytes of the expert in `slot` of bank i, tensor t (order of the plan), back from the device.
HOTMOE_API int32_t hotmoe_testing_read_slot(const struct hotmoe_cache * cache, int32_t i, int32_t t, int32_t slot, void * data, size_t size);

// Bytes of expert `expert` as they lie in host memory; for comparison with hotmoe_testing_read_slot. *size is set.
HOTMOE_API const void * hotmoe_testing_host_expert(const struct hotmoe_cache * cache, int32_t i, int32_t t, int32_t expert, size_t * size);

// The pages that advice (enum hotmoe_tier_advice) about [address, address + size) is for: [*begin, *end), *begin == *end for none.
HOTMOE_API void hotmoe_testing_round(uint64_t address, uint64_t size, int32_t advice, uint64_t page, uint64_t * begin, uint64_t * end);

// Advise about any memory, as a request for an expert would. Returns 0 if the system was asked, 1 if it reported an error, 2 if
// it was refused; *bytes: of the pages.
HOTMOE_API int32_t hotmoe_testing_advise(const void * data, size_t size, int32_t advice, uint64_t * bytes);

#ifdef __cplusplus
}
#endif

#endif
