// Least frequently and recently used: frequency over age.
//
// Evicts the expert with the smallest count / (age + grace). The age is the number of steps since the last use; a step is a
// ubatch of the bank, at decode a token. The count grows by one with every event that uses the expert, after what it was has
// been halved for each `half_life` (32) steps since the use before; it is kept for experts that are not resident, too.
// `grace` (8) steps keep the ratio from falling to a fraction of itself in the first tokens without a use, where an age says
// little. Ties go by expert id.
//
// The ratio falls with 1 / age where LRFU's sum falls exponentially: an expert that was used often is forgiven a long pause.
// Caches for experts in other engines use the plain quotient of count and age, both counted since the load. On recorded
// routing each of the three departures from that won: age since the use rather than the load, counts that outlive an eviction,
// and grace. The decay wins little there; it is for changes of topic, which short recordings do not have.
//
// Cost per event: one pow per expert; one division per comparison if something must go.

#include "policies.h"
#include "policy_util.h"

#include <vector>

struct policy_lfru : policy_base {
    double                half_life; // steps
    double                grace;     // steps
    std::vector<double>   count;     // per expert, as of its last use
    std::vector<uint64_t> last_use;  // per expert: step
    policy_clock          clock;

    policy_lfru(int32_t n_expert, double half_life, double grace) : half_life(half_life), grace(grace), count(n_expert, 0.0), last_use(n_expert, 0) {}

    void on_access(const hotmoe_event & event) {
        clock.tick(event);
        for (int32_t i = 0; i < event.n_experts; i++) {
            const int32_t id = event.experts[i];
            count[id]        = count[id] * policy_decay(clock.now - last_use[id], half_life) + 1.0;
            last_use[id]     = clock.now;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims,
                                  [this](int32_t id) { return count[id] / (double(clock.now - last_use[id]) + grace); });
    }

    void reset() {
        std::fill(count.begin(), count.end(), 0.0);
        std::fill(last_use.begin(), last_use.end(), 0);
        clock = {};
    }
};

hotmoe_policy policy_lfru_create(const hotmoe_policy_config & config, policy_options & options) {
    const double half_life = options.number("half_life", 32.0, 1e-3, 1e9);
    const double grace     = options.number("grace", 8.0, 1e-3, 1e9);
    return policy_wrap(new policy_lfru(config.n_expert, half_life, grace));
}
