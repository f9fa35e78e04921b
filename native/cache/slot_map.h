#pragma once

// The slot map of one bank: which expert sits in which slot, and what to load and to evict for an event.
//
// It owns the truth; the policy only ranks. It knows neither ggml nor bytes, so that replay and tests run the very code
// that the engine runs. Not thread-safe: one thread at a time, the one that runs the event.

#include "hotmoe/policy.h"

#include <cstdint>
#include <vector>

struct slot_load {
    int32_t expert;
    int32_t slot;
};

struct slot_event_result {
    int32_t                n_hits      = 0;
    int32_t                n_misses    = 0;
    int32_t                n_evictions = 0;
    bool                   fallback    = false; // the policy's answer was refused, victims were chosen by LRU
    std::vector<slot_load> loads; // in the order of the misses; the caller fills these slots before they are used
};

class slot_map {
  public:
    // Takes ownership of the policy (its free is called).
    slot_map(int32_t n_expert, int32_t n_slots, const hotmoe_policy & policy);
    ~slot_map();

    slot_map(const slot_map &)             = delete;
    slot_map & operator=(const slot_map &) = delete;

    // Give every expert of the event a slot. ids[n] are expert ids of all tokens, repetitions allowed; `event` has its
    // layer, phase, n_tokens and step set. false if an id is out of range (*bad_id is set) or if the distinct experts do not
    // fit in the slots (*bad_id is -1); nothing has changed then.
    bool acquire(const int32_t * ids, int64_t n, hotmoe_event event, slot_event_result & result, int32_t * bad_id);

    void clear();

    int32_t n_expert() const { return (int32_t) slot_of_expert.size(); }
    int32_t n_slots() const { return (int32_t) expert_of_slot.size(); }

    // -1: free
    int32_t expert_in(int32_t slot) const { return expert_of_slot[slot]; }

    // for tests: let an event's own experts be candidates
    bool unprotected = false;

  private:
    void choose_victims(const hotmoe_event & event, int32_t n, bool & fallback);
    bool answer_is_valid(int32_t n, int32_t answer);
    void lru_victims(int32_t n);

    hotmoe_policy policy;

    std::vector<int32_t>  slot_of_expert;
    std::vector<int32_t>  expert_of_slot;
    std::vector<int32_t>  free_slots;  // taken from the back
    std::vector<uint64_t> last_use;    // per expert, for the fallback
    uint64_t              tick = 0;

    // scratch of one event, kept to avoid allocations
    std::vector<uint32_t> seen_in; // per expert: number of the event that saw it last
    uint32_t              event_no = 0;
    std::vector<int32_t>  experts;
    std::vector<uint8_t>  hit;
    std::vector<int32_t>  missed;
    std::vector<int32_t>  candidates;
    std::vector<uint32_t> candidate_in; // per expert: number of the event in which it is a candidate
    std::vector<int32_t>  victims;
    std::vector<int32_t>  slots;
};
