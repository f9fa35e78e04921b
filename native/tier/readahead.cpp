// Read ahead: keep in host memory what tier 2 holds, and nothing else.
//
// Lets go of the experts that tier 2 drops, then asks for those that entered it. First the one, then the other: the memory that
// is let go of serves what is read, and a page that an expert on its way in shares with one on its way out stays. An expert that
// entered was used just now, so most of it is there; what is read ahead are the parts that were not touched, or that the
// system took back meanwhile. Cost per step: one request per expert that moved.

#include "tiers.h"

hotmoe_tier_manager tier_readahead_create(const hotmoe_tier_config &, policy_options &) {
    hotmoe_tier_manager out = {};
    out.struct_size         = sizeof(out);
    out.abi_version         = HOTMOE_TIER_ABI_VERSION;
    out.on_step             = [](void *, const hotmoe_tier_step * step, hotmoe_tier_request * requests, int32_t) {
        int32_t n = 0;
        for (int32_t i = 0; i < step->n_dropped; i++) {
            const hotmoe_tier_expert & e = step->dropped[i];
            requests[n++]                = { e.layer, e.bank, e.expert, HOTMOE_TIER_DONTNEED };
        }
        for (int32_t i = 0; i < step->n_used; i++) {
            const hotmoe_tier_expert & e = step->used[i];
            if (e.entered) {
                requests[n++] = { e.layer, e.bank, e.expert, HOTMOE_TIER_WILLNEED };
            }
        }
        return n;
    };
    return out;
}
