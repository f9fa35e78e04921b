// Segmented least recently used (Karedla, Love and Wherry, "Caching strategies to improve disk system performance",
// IEEE Computer 1994).
//
// A loaded expert starts on probation. A hit moves it to the protected segment, which holds at most `protected` (0.8) of the
// slots; if that is full, its least recently used expert goes back on probation, as the most recent one there. Victims come from
// probation, least recently used first, and from the protected segment only when probation has no candidate left. So an
// expert that was used once cannot push out one that was used again and again.
//
// Cost per event: one store per expert, one scan of the experts per promotion into a full protected segment.

#include "policies.h"
#include "policy_util.h"

#include <utility>
#include <vector>

struct policy_slru : policy_base {
    enum segment : uint8_t { absent,
                             probation,
                             guarded };

    std::vector<uint8_t>  where;  // per expert
    std::vector<uint64_t> recent; // per expert: order within its segment
    int32_t               n_guarded = 0;
    int32_t               max_guarded;
    uint64_t              tick = 0;

    policy_slru(int32_t n_expert, int32_t max_guarded) : where(n_expert, absent), recent(n_expert, 0), max_guarded(max_guarded) {}

    void on_access(const hotmoe_event & event) {
        for (int32_t i = 0; i < event.n_experts; i++) {
            const int32_t id = event.experts[i];
            if (where[id] == absent) { // a miss, or on loan
                continue;
            }
            recent[id] = ++tick;
            if (where[id] == probation && max_guarded > 0) {
                where[id] = guarded;
                n_guarded++;
                if (n_guarded > max_guarded) {
                    demote_oldest();
                }
            }
        }
    }

    void demote_oldest() {
        int32_t oldest = -1;
        for (int32_t id = 0; id < (int32_t) where.size(); id++) {
            if (where[id] == guarded && (oldest < 0 || recent[id] < recent[oldest])) {
                oldest = id;
            }
        }
        where[oldest]  = probation;
        recent[oldest] = ++tick;
        n_guarded--;
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        return policy_pick_lowest(n, candidates, n_candidates, victims,
                                  [this](int32_t id) { return std::make_pair(where[id], recent[id]); });
    }

    void on_evict(int32_t n, const int32_t * experts) {
        for (int32_t i = 0; i < n; i++) {
            n_guarded        -= where[experts[i]] == guarded;
            where[experts[i]] = absent;
        }
    }

    void on_load(int32_t n, const int32_t * experts) {
        for (int32_t i = 0; i < n; i++) {
            where[experts[i]]  = probation;
            recent[experts[i]] = ++tick;
        }
    }

    void reset() {
        std::fill(where.begin(), where.end(), absent);
        std::fill(recent.begin(), recent.end(), 0);
        n_guarded = 0;
        tick      = 0;
    }
};

hotmoe_policy policy_slru_create(const hotmoe_policy_config & config, policy_options & options) {
    const double share = options.number("protected", 0.8, 0.0, 1.0);
    return policy_wrap(new policy_slru(config.n_expert, (int32_t) (config.n_slots * share)));
}
