// Least recently and frequently used (Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and
// least frequently used policies", IEEE Transactions on Computers 2001).
//
// Every use of an expert has a weight that halves each `half_life` (16) steps; the expert with the smallest sum goes, the least
// recently used one of equals. A step is a ubatch of the bank, at decode a token. A short half-life makes it LRU, a long one
// LFU; the policy lfu is the same with a long one. Uses count whether the expert was resident or not: with so few experts all
// history can be kept, and on recorded routing forgetting at eviction lost a third of what this policy wins over LRU.
//
// All sums shrink at the same pace, so their order does not change between uses: with the sum c as of step t, the key
// log2(c) + t / half_life ranks the same as the sum would at any later time. Cost per event: one pow and one log2 per
// expert; one comparison of stored numbers per candidate if something must go.

#include "policies.h"
#include "policy_util.h"

#include <cmath>
#include <utility>
#include <vector>

struct policy_lrfu : policy_base {
    double                half_life; // steps
    std::vector<double>   sum;       // per expert, as of `changed`
    std::vector<uint64_t> changed;   // per expert: step
    std::vector<double>   key;       // per expert
    std::vector<uint64_t> last_use;  // per expert: order
    policy_clock          clock;
    uint64_t              tick = 0;

    policy_lrfu(int32_t n_expert, double half_life)
        : half_life(half_life), sum(n_expert, 0.0), changed(n_expert, 0), key(n_expert, 0.0), last_use(n_expert, 0) {}

    void on_access(const hotmoe_event & event) {
        clock.tick(event);
        for (int32_t i = 0; i < event.n_experts; i++) {
            const int32_t id = event.experts[i];
            sum[id]          = sum[id] * policy_decay(clock.now - changed[id], half_life) + 1.0;
            changed[id]      = clock.now;
            key[id]          = std::log2(sum[id]) + double(clock.now) / half_life;
            last_use[id]     = ++tick;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims,
                                  [this](int32_t id) { return std::make_pair(key[id], last_use[id]); });
    }

    void reset() {
        std::fill(sum.begin(), sum.end(), 0.0);
        std::fill(changed.begin(), changed.end(), 0);
        std::fill(key.begin(), key.end(), 0.0);
        std::fill(last_use.begin(), last_use.end(), 0);
        clock = {};
        tick  = 0;
    }
};

hotmoe_policy policy_lrfu_create(const hotmoe_policy_config & config, policy_options & options) {
    return policy_wrap(new policy_lrfu(config.n_expert, options.number("half_life", 16.0, 1e-3, 1e9)));
}
