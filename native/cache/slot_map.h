#pragma once

// The slot map of one bank: which expert sits in which slot, and what to load and to evict for an event.
//
// It owns the truth; policy and admission only rank and judge. It knows neither ggml nor bytes, so that replay and tests run
// the very code that the engine runs. Not thread-safe: one thread at a time, the one that runs the event.
//
// An expert that was not admitted sits in its slot on loan: such slots are taken first, the oldest before the others, and the
// policy is asked only when they do not suffice.

#include "hotmoe/policy.h"

#include <cstdint>
#include <vector>

struct slot_load {
    int32_t expert;
    int32_t slot;
};

struct slot_event_result {
    int32_t                n_experts = 0;
    int32_t                n_hits    = 0;
    int32_t                n_misses  = 0;
    int32_t                n_refused = 0;     // by the admission
    bool                   fallback  = false; // an answer was refused: victims were chosen by LRU, or all were admitted
    std::vector<int32_t>   evicted;
    std::vector<slot_load> loads; // in the order of the misses; the caller fills these slots before they are used
};

class slot_map {
  public:
    // Takes ownership of policy and admission (their free is called). With refuse_means_no_slot an expert that is not
    // admitted gets no slot, not even on loan: the caller serves it from elsewhere.
    slot_map(int32_t n_expert, int32_t n_slots, const hotmoe_policy & policy, const hotmoe_admission & admission = {}, bool refuse_means_no_slot = false);
    ~slot_map();

    slot_map(const slot_map &)             = delete;
    slot_map & operator=(const slot_map &) = delete;

    // Give every expert of the event a slot. ids[n] are expert ids of all tokens, repetitions allowed; weights[n] their router
    // weights, or NULL; `event` has its layer, bank, phase, n_tokens and step set. false if an id is out of range (*bad_id is
    // set) or if the distinct experts do not fit in the slots that are not pinned (*bad_id is -1); nothing has changed then.
    bool acquire(const int32_t * ids, const float * weights, int64_t n, hotmoe_event event, slot_event_result & result, int32_t * bad_id);

    // Take an expert's slot away, as when its bytes did not arrive. false: it has none.
    bool drop(int32_t expert);

    // Pinned experts are never evicted; pins count. false: it has no slot, or no pin.
    bool pin(int32_t expert);
    bool unpin(int32_t expert);

    // Give an expert a slot on loan, ahead of its use: a free one, or one on loan that is not pinned; never that of an admitted
    // expert. Returns the slot to fill, -1 if there is nothing to fill: it is resident, or there is no room.
    int32_t prefetch(int32_t expert);

    void clear();

    bool    wants_weights() const { return policy.wants_weights || admission.wants_weights; }
    int32_t n_expert() const { return (int32_t) slot_of_expert.size(); }
    int32_t n_slots() const { return (int32_t) expert_of_slot.size(); }

    // -1: free
    int32_t expert_in(int32_t slot) const { return expert_of_slot[slot]; }

    // -1: none
    int32_t slot_of(int32_t expert) const { return slot_of_expert[expert]; }

    // for tests: let the policy evict an event's own experts
    bool unprotected = false;

  private:
    void empty();
    bool collect(const int32_t * ids, const float * weights, int64_t n, int32_t * bad_id);
    void judge(const hotmoe_event & event, bool & fallback);
    void make_room(const hotmoe_event & event, int32_t n, slot_event_result & result);
    void choose_victims(const hotmoe_event & event, int32_t n, bool & fallback);
    bool answer_is_valid(int32_t n, int32_t answer);
    void lru_victims(int32_t n);
    void vacate(int32_t expert);
    bool can_be_evicted(int32_t expert) const { return pins[expert] == 0 && (unprotected || seen_in[expert] != event_no); }

    hotmoe_policy    policy;
    hotmoe_admission admission;
    bool             refuse_means_no_slot;

    std::vector<int32_t>  slot_of_expert;
    std::vector<int32_t>  expert_of_slot;
    std::vector<int32_t>  free_slots; // taken from the back
    std::vector<uint8_t>  admitted;   // per expert: resident, and not on loan
    std::vector<int32_t>  on_loan;    // experts on loan, the oldest first
    std::vector<int32_t>  pins;       // per expert
    int32_t               n_pinned = 0; // experts with a pin
    std::vector<uint64_t> last_use;   // per expert, for the fallback
    uint64_t              tick = 0;

    // Scratch of one event, kept to avoid allocations. All have room for n_expert, so their addresses never change.
    std::vector<uint32_t> seen_in; // per expert: number of the event that saw it last
    uint32_t              event_no = 0;
    std::vector<int32_t>  experts;
    std::vector<uint8_t>  hit;
    std::vector<float>    weight;
    std::vector<int32_t>  position; // per expert: its index in `experts`
    std::vector<int32_t>  judged;
    std::vector<uint8_t>  verdict;
    std::vector<int32_t>  kept; // got a slot to keep in this event
    std::vector<int32_t>  candidates;
    std::vector<uint32_t> candidate_in; // per expert: number of the event in which it is a candidate
    std::vector<int32_t>  victims;
    std::vector<int32_t>  slots;
};
