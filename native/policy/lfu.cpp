// Least frequently used, with decay.
//
// Every expert has a count that halves each `half_life` (64) steps and grows by one per event that uses the expert. Counts are
// kept for experts that are not resident, too, so that a returning expert is judged by its history. Without decay LFU holds on
// to what an earlier topic used and loses many points of hit rate when the topic changes; with decay the count is an estimate
// of the recent rate of use. Ties go to the least recently used. How it is done, and the cost: decayed_count.h.

#include "decayed_count.h"
#include "policies.h"

hotmoe_policy policy_lfu_create(const hotmoe_policy_config & config, policy_options & options) {
    return policy_wrap(new policy_decayed_count(config.n_expert, options.number("half_life", 64.0, 1e-3, 1e9)));
}
