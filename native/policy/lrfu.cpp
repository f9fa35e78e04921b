// Least recently and frequently used (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and
// least frequently used policies", IEEE Transactions on Computers 2001).
//
// Every use of an expert has a weight that halves each `half_life` (16) steps; the expert with the smallest sum goes, the least
// recently used one of equals. A short half-life makes it LRU, a long one LFU; the policy lfu is the same with a long one. Uses
// count whether the expert was resident or not: with so few experts all history can be kept, and on recorded routing forgetting
// at eviction lost a third of what this policy wins over LRU. How it is done, and the cost: decayed_count.h.

#include "decayed_count.h"
#include "policies.h"

hotmoe_policy policy_lrfu_create(const hotmoe_policy_config & config, policy_options & options) {
    return policy_wrap(new policy_decayed_count(config.n_expert, options.number("half_life", 16.0, 1e-3, 1e9)));
}
