#include "slot_map.h"

#include <algorithm>

slot_map::slot_map(int32_t n_expert, int32_t n_slots, const hotmoe_policy & policy)
    : policy(policy), slot_of_expert(n_expert, -1), expert_of_slot(n_slots, -1), last_use(n_expert, 0),
      seen_in(n_expert, 0), candidate_in(n_expert, 0) {
    clear();
}

slot_map::~slot_map() {
    if (policy.free) {
        policy.free(policy.context);
    }
}

void slot_map::clear() {
    std::fill(slot_of_expert.begin(), slot_of_expert.end(), -1);
    std::fill(expert_of_slot.begin(), expert_of_slot.end(), -1);
    free_slots.clear();
    for (int32_t s = n_slots() - 1; s >= 0; s--) {
        free_slots.push_back(s);
    }
    if (policy.reset) {
        policy.reset(policy.context);
    }
}

bool slot_map::acquire(const int32_t * ids, int64_t n, hotmoe_event event, slot_event_result & result, int32_t * bad_id) {
    result.n_hits = result.n_misses = result.n_evictions = 0;
    result.fallback                                      = false;
    result.loads.clear();

    if (++event_no == 0) { // wrapped: old marks would look current
        std::fill(seen_in.begin(), seen_in.end(), 0);
        std::fill(candidate_in.begin(), candidate_in.end(), 0);
        event_no = 1;
    }

    experts.clear();
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = ids[i];
        if (id < 0 || id >= n_expert()) {
            *bad_id = id;
            return false;
        }
        if (seen_in[id] != event_no) {
            seen_in[id] = event_no;
            experts.push_back(id);
        }
    }
    if ((int32_t) experts.size() > n_slots()) {
        *bad_id = -1;
        return false;
    }

    hit.clear();
    missed.clear();
    for (const int32_t id : experts) {
        const bool resident = slot_of_expert[id] >= 0;
        hit.push_back(resident ? 1 : 0);
        if (!resident) {
            missed.push_back(id);
        }
        last_use[id] = ++tick;
    }

    event.n_experts = (int32_t) experts.size();
    event.experts   = experts.data();
    event.hit       = hit.data();

    result.n_misses = (int32_t) missed.size();
    result.n_hits   = event.n_experts - result.n_misses;

    if (policy.on_access) {
        policy.on_access(policy.context, &event);
    }
    if (missed.empty()) {
        return true;
    }

    const int32_t n_evict = result.n_misses - (int32_t) free_slots.size();
    if (n_evict > 0) {
        choose_victims(event, n_evict, result.fallback);
        for (const int32_t id : victims) {
            const int32_t slot   = slot_of_expert[id];
            slot_of_expert[id]   = -1;
            expert_of_slot[slot] = -1;
            free_slots.push_back(slot);
        }
        if (policy.on_evict) {
            policy.on_evict(policy.context, &event, n_evict, victims.data());
        }
        result.n_evictions = n_evict;
    }

    slots.clear();
    for (const int32_t id : missed) {
        const int32_t slot = free_slots.back();
        free_slots.pop_back();
        slot_of_expert[id]   = slot;
        expert_of_slot[slot] = id;
        slots.push_back(slot);
        result.loads.push_back({ id, slot });
    }
    if (policy.on_load) {
        policy.on_load(policy.context, &event, result.n_misses, missed.data(), slots.data());
    }
    return true;
}

void slot_map::choose_victims(const hotmoe_event & event, int32_t n, bool & fallback) {
    candidates.clear();
    for (const int32_t id : expert_of_slot) {
        if (id >= 0 && (unprotected || seen_in[id] != event_no)) {
            candidates.push_back(id);
            candidate_in[id] = event_no;
        }
    }

    victims.assign(n, -1);
    const int32_t answer = policy.select_evict(policy.context, &event, n, candidates.data(), (int32_t) candidates.size(), victims.data());
    fallback             = !answer_is_valid(n, answer);
    if (fallback) {
        lru_victims(n);
    }
}

bool slot_map::answer_is_valid(int32_t n, int32_t answer) {
    if (answer != n) {
        return false;
    }
    for (const int32_t id : victims) {
        if (id < 0 || id >= n_expert() || candidate_in[id] != event_no) {
            return false;
        }
        candidate_in[id] = 0; // a second time is a duplicate
    }
    return true;
}

void slot_map::lru_victims(int32_t n) {
    victims = candidates;
    std::partial_sort(victims.begin(), victims.begin() + n, victims.end(),
                      [this](int32_t a, int32_t b) { return last_use[a] < last_use[b]; });
    victims.resize(n);
}
