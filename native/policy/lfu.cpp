// Least frequently used, with decay.
//
// Every expert has a count that halves each `half_life` (64) steps and grows by one per event that uses the expert; a step is
// a ubatch of the bank, at decode a token. Counts are kept for experts that are not resident, too, so that a returning expert
// is judged by its history. Without decay LFU holds on to what an earlier topic used and loses many points of hit rate when
// the topic changes; with decay the count is an estimate of the recent rate of use. Ties go to the least recently used.
//
// Counts are stored as of the step in which they changed last and aged when read. Cost per event: one pow per expert, and one
// per candidate if something must go. lrfu.cpp shows how to do without the latter.

#include "policies.h"
#include "policy_util.h"

#include <utility>
#include <vector>

struct policy_lfu : policy_base {
    double                half_life; // steps
    std::vector<double>   count;     // per expert, as of `changed`
    std::vector<uint64_t> changed;   // per expert: step
    std::vector<uint64_t> last_use;
    policy_clock          clock;
    uint64_t              tick = 0;

    policy_lfu(int32_t n_expert, double half_life) : half_life(half_life), count(n_expert, 0.0), changed(n_expert, 0), last_use(n_expert, 0) {}

    double aged(int32_t id) const { return count[id] * policy_decay(clock.now - changed[id], half_life); }

    void on_access(const hotmoe_event & event) {
        clock.tick(event);
        for (int32_t i = 0; i < event.n_experts; i++) {
            const int32_t id = event.experts[i];
            count[id]        = aged(id) + 1.0;
            changed[id]      = clock.now;
            last_use[id]     = ++tick;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims,
                                  [this](int32_t id) { return std::make_pair(aged(id), last_use[id]); });
    }

    void reset() {
        std::fill(count.begin(), count.end(), 0.0);
        std::fill(changed.begin(), changed.end(), 0);
        std::fill(last_use.begin(), last_use.end(), 0);
        clock = {};
        tick  = 0;
    }
};

hotmoe_policy policy_lfu_create(const hotmoe_policy_config & config, policy_options & options) {
    return policy_wrap(new policy_lfu(config.n_expert, options.number("half_life", 64.0, 1e-3, 1e9)));
}
