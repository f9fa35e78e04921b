#pragma once

// What lfu and lrfu have in common: each expert has a count that halves every `half_life` steps and grows by one per event that
// uses the expert; the lowest count goes, the least recently used one of equals. A step is a ubatch of the bank, at decode a
// token.
//
// All counts shrink at the same pace, so their order does not change between uses: with the count c as of step t, the key
// log2(c) + t / half_life ranks the same as the count would at any later time. Cost per event: one pow and one log2 per
// expert; one comparison of stored numbers per candidate if something must go.

#include "policy_util.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

struct policy_decayed_count : policy_base {
    double                half_life; // steps
    std::vector<double>   count;     // per expert, as of `changed`
    std::vector<uint64_t> changed;   // per expert: step
    std::vector<double>   key;       // per expert
    std::vector<uint64_t> last_use;  // per expert: order
    policy_clock          clock;
    uint64_t              tick = 0;

    policy_decayed_count(int32_t n_expert, double half_life)
        : half_life(half_life), count(n_expert, 0.0), changed(n_expert, 0), key(n_expert, 0.0), last_use(n_expert, 0) {}

    void on_access(const hotmoe_event & event) {
        clock.tick(event);
        for (int32_t i = 0; i < event.n_experts; i++) {
            const int32_t id = event.experts[i];
            count[id]        = count[id] * policy_decay(clock.now - changed[id], half_life) + 1.0;
            changed[id]      = clock.now;
            key[id]          = std::log2(count[id]) + double(clock.now) / half_life;
            last_use[id]     = ++tick;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims,
                                  [this](int32_t id) { return std::make_pair(key[id], last_use[id]); });
    }

    void reset() {
        std::fill(count.begin(), count.end(), 0.0);
        std::fill(changed.begin(), changed.end(), 0);
        std::fill(key.begin(), key.end(), 0.0);
        std::fill(last_use.begin(), last_use.end(), 0);
        clock = {};
        tick  = 0;
    }
};
