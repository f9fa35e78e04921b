// Least recently used.
//
// Evicts the expert whose last use is the oldest. Experts of one event count as used in the order of their first
// appearance among the ids. Cost per event: one store per expert; one partial sort of the candidates if something must go.

#include "policies.h"
#include "policy_util.h"

#include <vector>

struct policy_lru : policy_base {
    std::vector<uint64_t> last_use; // per expert, 0 = never
    uint64_t              tick = 0;

    explicit policy_lru(int32_t n_expert) : last_use(n_expert, 0) {}

    void on_access(const hotmoe_event & event) {
        for (int32_t i = 0; i < event.n_experts; i++) {
            last_use[event.experts[i]] = ++tick;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims, [this](int32_t id) { return last_use[id]; });
    }

    void reset() {
        std::fill(last_use.begin(), last_use.end(), 0);
        tick = 0;
    }
};

hotmoe_policy policy_lru_create(const hotmoe_policy_config & config, policy_options &) {
    return policy_wrap(new policy_lru(config.n_expert));
}
