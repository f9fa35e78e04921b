// Admission: by a ghost queue.
//
// An expert is admitted if its id is in a queue of those that lost a slot, or were refused one, not long ago. The queue holds
// `size` (1) times as many ids as the pool has slots, and forgets the oldest. An id that comes again moves to its new end, and one
// that is admitted leaves it. Where the second-miss admission remembers for a time, this one remembers a number of experts: the more
// of them come and go, the shorter.
//
// Cost per event: a search in the queue for each expert judged or evicted that is in it.

#include "policies.h"
#include "policy_util.h"

#include <deque>
#include <vector>

struct admission_ghost : policy_base {
    size_t               max_ghosts;
    std::deque<int32_t>  ghosts;   // the oldest in front
    std::vector<uint8_t> is_ghost; // per expert

    admission_ghost(int32_t n_expert, size_t max_ghosts) : max_ghosts(max_ghosts), is_ghost(n_expert, 0) {}

    bool admit(int32_t expert) {
        if (is_ghost[expert]) {
            forget(expert);
            return true;
        }
        remember(expert);
        return false;
    }

    void on_evict(int32_t n, const int32_t * experts) {
        for (int32_t i = 0; i < n; i++) {
            if (is_ghost[experts[i]]) {
                forget(experts[i]);
            }
            remember(experts[i]);
        }
    }

    void remember(int32_t expert) {
        is_ghost[expert] = 1;
        ghosts.push_back(expert);
        if (ghosts.size() > max_ghosts) {
            is_ghost[ghosts.front()] = 0;
            ghosts.pop_front();
        }
    }

    void forget(int32_t expert) {
        is_ghost[expert] = 0;
        ghosts.erase(std::find(ghosts.begin(), ghosts.end(), expert));
    }

    void reset() {
        ghosts.clear();
        std::fill(is_ghost.begin(), is_ghost.end(), 0);
    }
};

hotmoe_admission admission_ghost_create(const hotmoe_policy_config & config, policy_options & options) {
    const double size = options.number("size", 1.0, 0.0, 1000.0);
    return admission_wrap(new admission_ghost(config.n_expert, (size_t) std::max(1, (int32_t) (config.n_slots * size))));
}
