// Least frequently and recently used: frequency over age.
//
// Evicts the expert with the smallest count / (age + grace). The age is the number of steps since the last use; a step is a
// ubatch of the bank, at decode a token. The count grows by one with every event that uses the expert, after what it was has
// been halved for each `half_life` (32) steps since the use before; it is kept for experts that are not resident, too.
// `grace` (8) steps keep the ratio from falling to a fraction of itself in the first tokens without a use, where an age says
// little. Ties go to the least recently used.
//
// The ratio falls with 1 / age where LRFU's sum falls exponentially: an expert that was used often is forgiven a long pause.
// Caches for experts in other engines take the plain quotient, with counts that start when an expert is loaded. On recorded
// routing it won to let counts outlive an eviction, and to give grace; an age since the load lost. The decay wins little
// there; it is for changes of topic, which short recordings do not have.
//
// Cost per event: one pow per expert; one division per comparison if something must go.

#include "policies.h"
#include "policy_util.h"

#include <utility>
#include <vector>

struct policy_lfru : policy_base {
    double                half_life; // steps
    double                grace;     // steps
    std::vector<double>   count;     // per expert, as of its last use
    std::vector<uint64_t> used_in;   // per expert: step of the last use
    std::vector<uint64_t> last_use;  // per expert: order of the last use
    policy_clock          clock;
    uint64_t              tick = 0;

    policy_lfru(int32_t n_expert, double half_life, double grace)
        : half_life(half_life), grace(grace), count(n_expert, 0.0), used_in(n_expert, 0), last_use(n_expert, 0) {}

    void on_access(const hotmoe_event & event) {
        clock.tick(event);
        for (int32_t i = 0; i < event.n_experts; i++) {
            const int32_t id = event.experts[i];
            count[id]        = count[id] * policy_decay(clock.now - used_in[id], half_life) + 1.0;
            used_in[id]      = clock.now;
            last_use[id]     = ++tick;
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims, [this](int32_t id) {
            return std::make_pair(count[id] / (double(clock.now - used_in[id]) + grace), last_use[id]);
        });
    }

    void reset() {
        std::fill(count.begin(), count.end(), 0.0);
        std::fill(used_in.begin(), used_in.end(), 0);
        std::fill(last_use.begin(), last_use.end(), 0);
        clock = {};
        tick  = 0;
    }
};

hotmoe_policy policy_lfru_create(const hotmoe_policy_config & config, policy_options & options) {
    const double half_life = options.number("half_life", 32.0, 1e-3, 1e9);
    const double grace     = options.number("grace", 8.0, 1e-3, 1e9);
    return policy_wrap(new policy_lfru(config.n_expert, half_life, grace));
}
