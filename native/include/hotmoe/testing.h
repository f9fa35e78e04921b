#ifndef HOTMOE_TESTING_H
#define HOTMOE_TESTING_H

// For tests only: break the cache on purpose, to show that the tests would notice, and look inside a slot.

#include "cache.h"

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
};

HOTMOE_API void hotmoe_testing_set_fault(struct hotmoe_cache * cache, int32_t fault);

// Read `size` bytes of the expert in `slot` of bank i, tensor t (order of the plan), back from the device.
HOTMOE_API int32_t hotmoe_testing_read_slot(const struct hotmoe_cache * cache, int32_t i, int32_t t, int32_t slot, void * data, size_t size);

// Bytes of expert `expert` as they lie in host memory; for comparison with hotmoe_testing_read_slot. *size is set.
HOTMOE_API const void * hotmoe_testing_host_expert(const struct hotmoe_cache * cache, int32_t i, int32_t t, int32_t expert, size_t * size);

#ifdef __cplusplus
}
#endif

#endif
