// None: the page cache decides alone.
//
// It is told of every step like any other manager, so its counters say what tier 2 would have held. A cache for which no
// manager, or this one, is asked for has none at all.

#include "tiers.h"

hotmoe_tier_manager tier_none_create(const hotmoe_tier_config &, policy_options &) {
    hotmoe_tier_manager out = {};
    out.struct_size         = sizeof(out);
    out.abi_version         = HOTMOE_TIER_ABI_VERSION;
    out.on_step             = [](void *, const hotmoe_tier_step *, hotmoe_tier_request *, int32_t) { return 0; };
    return out;
}
