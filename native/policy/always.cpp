// Admission: always.
//
// Every expert that missed keeps its slot. Nothing is asked and nothing is counted: without a function `admit` the cache
// admits all. It costs nothing.

#include "policies.h"

hotmoe_admission admission_always_create(const hotmoe_policy_config &, policy_options &) {
    hotmoe_admission out = {};
    out.struct_size      = sizeof(out);
    out.abi_version      = HOTMOE_POLICY_ABI_VERSION;
    return out;
}
