// Least-stale (Hoang, Jaiswal, Samragh and Cho, "SpecMD: a comprehensive study on speculative expert prefetching", 2026).
//
// The idea, for one cache that all layers share: an expert that the present forward pass has used is fresh, all others are
// stale. Stale ones go first, in the order in which they were loaded. When only fresh ones are left, the one goes that was
// used first in this pass: its layer's turn comes last.
//
// In a pool of one layer the experts of the present pass are those of the present event, which never are candidates, and the
// rule would be plain FIFO. So an expert is fresh here if it was used in the last `window` (2) steps, the present one included:
// the experts of the token before stay. `window=1` in a pool that all layers share is the policy of the paper; a window
// without end is LRU. A step is a ubatch of the bank, at decode a token.
//
// Cost per event: two stores per expert.

#include "policies.h"
#include "policy_util.h"

#include <utility>
#include <vector>

struct policy_least_stale : policy_base {
    uint64_t              window;    // steps
    std::vector<uint64_t> used_in;   // per expert: step of the last use
    std::vector<uint64_t> used_at;   // per expert: order of the last use
    std::vector<uint64_t> loaded_at; // per expert: order of loading
    policy_clock          clock;
    uint64_t              tick = 0;

    policy_least_stale(int32_t n_expert, uint64_t window) : window(window), used_in(n_expert, 0), used_at(n_expert, 0), loaded_at(n_expert, 0) {}

    void on_access(const hotmoe_event & event) {
        clock.tick(event);
        for (int32_t i = 0; i < event.n_experts; i++) {
            used_in[event.experts[i]] = clock.now;
            used_at[event.experts[i]] = ++tick;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims, [this](int32_t id) {
            const bool fresh = clock.now - used_in[id] < window;
            return std::make_pair(fresh, fresh ? used_at[id] : loaded_at[id]);
        });
    }

    void on_load(int32_t n, const int32_t * experts) {
        for (int32_t i = 0; i < n; i++) {
            loaded_at[experts[i]] = ++tick;
        }
    }

    void reset() {
        std::fill(used_in.begin(), used_in.end(), 0);
        std::fill(used_at.begin(), used_at.end(), 0);
        std::fill(loaded_at.begin(), loaded_at.end(), 0);
        clock = {};
        tick  = 0;
    }
};

hotmoe_policy policy_least_stale_create(const hotmoe_policy_config & config, policy_options & options) {
    return policy_wrap(new policy_least_stale(config.n_expert, (uint64_t) options.integer("window", 2, 1, 1000000000)));
}
