// Admission: after the second miss.
//
// An expert is admitted when it is needed again after a miss that is still remembered, be it a miss again or found in its slot
// on loan; a first miss is refused and remembered. So what is used once, in a long prompt for example, takes no slot from
// what is used again and again.
//
// A miss is remembered for `memory` (64) steps of the bank, at decode tokens, counted from the last time that the expert was
// refused. Admission forgets it: an expert that loses its slot starts anew. Cost per event: one store per expert judged.

#include "policies.h"
#include "policy_util.h"

#include <vector>

struct admission_second_miss : policy_base {
    uint64_t              memory;  // steps
    std::vector<uint64_t> refused; // per expert: step of the miss that is remembered, 0 = none
    policy_clock          clock;

    admission_second_miss(int32_t n_expert, uint64_t memory) : memory(memory), refused(n_expert, 0) {}

    void on_access(const hotmoe_event & event) { clock.tick(event); }

    bool admit(int32_t expert) {
        const bool again = refused[expert] > 0 && clock.now - refused[expert] <= memory;
        refused[expert]  = again ? 0 : clock.now;
        return again;
    }

    void reset() {
        std::fill(refused.begin(), refused.end(), 0);
        clock = {};
    }
};

hotmoe_admission admission_second_miss_create(const hotmoe_policy_config & config, policy_options & options) {
    return admission_wrap(new admission_second_miss(config.n_expert, (uint64_t) options.integer("memory", 64, 1, 1000000000)));
}
