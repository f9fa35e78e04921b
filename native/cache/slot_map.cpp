#include "slot_map.h"

#include <algorithm>

slot_map::slot_map(int32_t n_expert, int32_t n_slots, const hotmoe_policy & policy, const hotmoe_admission & admission, bool refuse_means_no_slot)
    : policy(policy), admission(admission), refuse_means_no_slot(refuse_means_no_slot), slot_of_expert(n_expert, -1), expert_of_slot(n_slots, -1),
      admitted(n_expert, 0), pins(n_expert, 0), last_use(n_expert, 0), seen_in(n_expert, 0), position(n_expert, 0), candidate_in(n_expert, 0) {
    for (std::vector<int32_t> * v : { &experts, &judged, &kept, &candidates, &victims, &slots }) {
        v->reserve(n_expert);
    }
    hit.reserve(n_expert);
    weight.reserve(n_expert);
    verdict.reserve(n_expert);
    empty();
}

slot_map::~slot_map() {
    if (policy.free) {
        policy.free(policy.context);
    }
    if (admission.free) {
        admission.free(admission.context);
    }
}

void slot_map::empty() {
    std::fill(slot_of_expert.begin(), slot_of_expert.end(), -1);
    std::fill(expert_of_slot.begin(), expert_of_slot.end(), -1);
    std::fill(admitted.begin(), admitted.end(), 0);
    std::fill(pins.begin(), pins.end(), 0);
    n_pinned = 0;
    on_loan.clear();
    free_slots.clear();
    for (int32_t s = n_slots() - 1; s >= 0; s--) {
        free_slots.push_back(s);
    }
}

void slot_map::clear() {
    empty();
    if (policy.reset) {
        policy.reset(policy.context);
    }
    if (admission.reset) {
        admission.reset(admission.context);
    }
}

//
// one event
//

bool slot_map::acquire(const int32_t * ids, const float * weights, int64_t n, hotmoe_event event, slot_event_result & result, int32_t * bad_id) {
    result.n_experts = result.n_hits = result.n_misses = result.n_refused = 0;
    result.fallback                                                       = false;
    result.evicted.clear();
    result.loads.clear();

    if (!collect(ids, weights, n, bad_id)) {
        return false;
    }

    hit.clear();
    judged.clear();
    for (const int32_t id : experts) {
        hit.push_back(slot_of_expert[id] >= 0);
        result.n_hits += hit.back();
        last_use[id]   = ++tick;
        if (!admitted[id]) {
            judged.push_back(id);
        }
    }

    event.n_experts = (int32_t) experts.size();
    event.experts   = experts.data();
    event.hit       = hit.data();
    event.weights   = weights ? weight.data() : nullptr;

    result.n_experts = event.n_experts;
    result.n_misses  = event.n_experts - result.n_hits;

    if (policy.on_access) {
        policy.on_access(policy.context, &event);
    }
    if (admission.on_access) {
        admission.on_access(admission.context, &event);
    }
    if (judged.empty()) {
        return true;
    }
    judge(event, result.fallback);

    // which of them get a slot
    int32_t n_loads = 0;
    for (size_t i = 0; i < judged.size(); i++) {
        const bool refused = !verdict[i];
        n_loads           += slot_of_expert[judged[i]] < 0 && !(refused && refuse_means_no_slot);
        result.n_refused  += refused;
    }
    if (refuse_means_no_slot) { // nothing is owed to those for which there is no room
        const int32_t n_here = event.n_experts - result.n_misses;
        int32_t       room   = n_slots() - n_here;
        for (int32_t s = 0; s < n_slots() && n_pinned > 0; s++) {
            const int32_t id = expert_of_slot[s];
            room            -= id >= 0 && pins[id] > 0 && seen_in[id] != event_no;
        }
        n_loads = std::min(n_loads, room);
    }
    if (n_loads > (int32_t) free_slots.size()) {
        make_room(event, n_loads - (int32_t) free_slots.size(), result);
    }

    kept.clear();
    slots.clear();
    for (size_t i = 0; i < judged.size(); i++) {
        const int32_t id   = judged[i];
        int32_t       slot = slot_of_expert[id];
        if (slot < 0) {
            if ((!verdict[i] && refuse_means_no_slot) || n_loads == 0) {
                continue;
            }
            n_loads--;
            slot = free_slots.back();
            free_slots.pop_back();
            slot_of_expert[id]   = slot;
            expert_of_slot[slot] = id;
            result.loads.push_back({ id, slot });
            if (!verdict[i]) {
                on_loan.push_back(id);
            }
        } else if (verdict[i]) {
            on_loan.erase(std::find(on_loan.begin(), on_loan.end(), id));
        }
        if (verdict[i]) {
            admitted[id] = 1;
            kept.push_back(id);
            slots.push_back(slot);
        }
    }
    if (policy.on_load && !kept.empty()) {
        policy.on_load(policy.context, &event, (int32_t) kept.size(), kept.data(), slots.data());
    }
    return true;
}

// The distinct experts of the event, in the order of their first use.
bool slot_map::collect(const int32_t * ids, const float * weights, int64_t n, int32_t * bad_id) {
    if (++event_no == 0) { // wrapped: old marks would look current
        std::fill(seen_in.begin(), seen_in.end(), 0);
        std::fill(candidate_in.begin(), candidate_in.end(), 0);
        event_no = 1;
    }
    experts.clear();
    weight.clear();
    int32_t n_pinned_here = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = ids[i];
        if (id < 0 || id >= n_expert()) {
            *bad_id = id;
            return false;
        }
        if (seen_in[id] != event_no) {
            seen_in[id]  = event_no;
            position[id] = (int32_t) experts.size();
            experts.push_back(id);
            n_pinned_here += pins[id] > 0;
            if (weights) {
                weight.push_back(weights[i]);
            }
        } else if (weights) {
            weight[position[id]] += weights[i];
        }
    }
    if (!refuse_means_no_slot && (int32_t) experts.size() > n_slots() - (n_pinned - n_pinned_here)) {
        *bad_id = -1;
        return false;
    }
    return true;
}

// Which of the event's experts that have no slot to keep may keep one from now on.
void slot_map::judge(const hotmoe_event & event, bool & fallback) {
    verdict.assign(judged.size(), 1);
    if (admission.admit) {
        const int32_t n = (int32_t) judged.size();
        if (admission.admit(admission.context, &event, n, judged.data(), verdict.data()) != n) {
            fallback = true;
            verdict.assign(judged.size(), 1);
        }
    }
}

// Free n slots: those on loan first, then those of the policy's victims.
void slot_map::make_room(const hotmoe_event & event, int32_t n, slot_event_result & result) {
    victims.clear();
    for (size_t i = 0; i < on_loan.size() && (int32_t) victims.size() < n; i++) {
        if (pins[on_loan[i]] == 0 && seen_in[on_loan[i]] != event_no) {
            victims.push_back(on_loan[i]);
        }
    }
    const auto evict = [&]() {
        if (admission.on_evict && !victims.empty()) {
            admission.on_evict(admission.context, &event, (int32_t) victims.size(), victims.data());
        }
        for (const int32_t id : victims) {
            vacate(id);
            result.evicted.push_back(id);
        }
    };
    evict();
    const int32_t n_more = n - (int32_t) victims.size();
    if (n_more > 0) {
        choose_victims(event, n_more, result.fallback);
        evict();
        if (policy.on_evict) {
            policy.on_evict(policy.context, &event, n_more, victims.data());
        }
    }
}

void slot_map::choose_victims(const hotmoe_event & event, int32_t n, bool & fallback) {
    candidates.clear();
    for (const int32_t id : expert_of_slot) {
        if (id >= 0 && admitted[id] && can_be_evicted(id)) {
            candidates.push_back(id);
            candidate_in[id] = event_no;
        }
    }

    victims.assign(n, -1);
    const int32_t answer = policy.select_evict(policy.context, &event, n, candidates.data(), (int32_t) candidates.size(), victims.data());
    if (!answer_is_valid(n, answer)) {
        fallback = true;
        if (answer == n && policy.on_refused) {
            policy.on_refused(policy.context, &event, n, victims.data());
        }
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
    victims.assign(candidates.begin(), candidates.end());
    std::partial_sort(victims.begin(), victims.begin() + n, victims.end(),
                      [this](int32_t a, int32_t b) { return last_use[a] < last_use[b]; });
    victims.resize(n);
}

void slot_map::vacate(int32_t expert) {
    const int32_t slot     = slot_of_expert[expert];
    slot_of_expert[expert] = -1;
    expert_of_slot[slot]   = -1;
    free_slots.push_back(slot);
    if (!admitted[expert]) {
        on_loan.erase(std::find(on_loan.begin(), on_loan.end(), expert));
    }
    admitted[expert] = 0;
}

//
// outside of events
//

bool slot_map::drop(int32_t expert) {
    if (slot_of_expert[expert] < 0) {
        return false;
    }
    const bool was_admitted = admitted[expert];
    n_pinned               -= pins[expert] > 0;
    pins[expert]            = 0;
    vacate(expert);
    victims.assign(1, expert);
    if (policy.on_evict && was_admitted) {
        policy.on_evict(policy.context, nullptr, 1, victims.data());
    }
    if (admission.on_evict) {
        admission.on_evict(admission.context, nullptr, 1, victims.data());
    }
    return true;
}

bool slot_map::pin(int32_t expert) {
    if (slot_of_expert[expert] < 0) {
        return false;
    }
    n_pinned += pins[expert]++ == 0;
    return true;
}

bool slot_map::unpin(int32_t expert) {
    if (pins[expert] == 0) {
        return false;
    }
    n_pinned -= --pins[expert] == 0;
    return true;
}

int32_t slot_map::prefetch(int32_t expert) {
    if (slot_of_expert[expert] >= 0) {
        return -1;
    }
    if (free_slots.empty()) {
        const auto oldest = std::find_if(on_loan.begin(), on_loan.end(), [this](int32_t id) { return pins[id] == 0; });
        if (oldest == on_loan.end()) {
            return -1;
        }
        victims.assign(1, *oldest);
        vacate(victims[0]);
        if (admission.on_evict) {
            admission.on_evict(admission.context, nullptr, 1, victims.data());
        }
    }
    const int32_t slot = free_slots.back();
    free_slots.pop_back();
    slot_of_expert[expert] = slot;
    expert_of_slot[slot]   = expert;
    on_loan.push_back(expert);
    return slot;
}
