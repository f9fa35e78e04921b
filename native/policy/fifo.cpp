// First in, first out.
//
// Evicts the expert that was loaded longest ago, however often it was used since. The cheapest policy, and the lower
// bound that the others have to beat. Cost per event: one store per load.

#include "policies.h"
#include "policy_util.h"

#include <vector>

struct policy_fifo : policy_base {
    std::vector<uint64_t> loaded_at; // per expert
    uint64_t              tick = 0;

    explicit policy_fifo(int32_t n_expert) : loaded_at(n_expert, 0) {}

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims, [this](int32_t id) { return loaded_at[id]; });
    }

    void on_load(int32_t n, const int32_t * experts) {
        for (int32_t i = 0; i < n; i++) {
            loaded_at[experts[i]] = ++tick;
        }
    }

    void reset() {
        std::fill(loaded_at.begin(), loaded_at.end(), 0);
        tick = 0;
    }
};

hotmoe_policy policy_fifo_create(const hotmoe_policy_config & config, policy_options &) {
    return policy_wrap(new policy_fifo(config.n_expert));
}
