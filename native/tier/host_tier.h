#pragma once

// Tier 2 of one cache: which experts host memory is to hold, and the tier manager that sees to it.
//
// It knows where the experts lie in memory, and nothing of the model. The order of calls is that of the evaluation: begin_step,
// use for each bank, and end_step when the step is over, which is noticed when the next one begins, or when somebody
// looks. Only end_step calls the manager. One thread at a time.

#include "cache/slot_map.h"
#include "tier/advise.h"

#include "hotmoe/tier.h"

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

// The bytes of one tensor of a bank: expert i begins at data + i * expert_bytes.
struct tier_tensor {
    const char * data         = nullptr;
    size_t       expert_bytes = 0;
};

struct tier_bank {
    hotmoe_tier_bank         info = {};
    std::vector<tier_tensor> tensors;
};

class host_tier {
  public:
    // Make one for banks, whose info.host_slots are set, with a manager by name. Returns a status.
    static int32_t create(const char * manager, const std::vector<tier_bank> & banks, std::unique_ptr<host_tier> & out);
    ~host_tier();

    host_tier(const host_tier &)             = delete;
    host_tier & operator=(const host_tier &) = delete;

    // event: step, phase and n_tokens are looked at
    void begin_step(const hotmoe_event & event);

    // ids[n] of bank (layer, bank), of all tokens; repetitions are allowed. A bank that is not here, and ids that are out of
    // range, are passed over.
    void use(const hotmoe_event & event, const int32_t * ids, int64_t n);

    // Tell the manager of the step that began last, once, and do what it asks for. No exception leaves.
    void end_step();

    // Tier 2 is taken to be empty, and what was seen of the present step is forgotten.
    void clear();

    // Tensors whose experts may be advised about, and all.
    int32_t n_advisable() const { return advisable; }
    int32_t n_tensors() const { return tensors; }

    bool resident(int32_t i, int32_t expert, uint64_t * bytes, uint64_t * in_cache) const;

    const std::vector<hotmoe_tier_bank> & banks() const { return infos; }

    hotmoe_tier_counters counters = {};

  private:
    struct state {
        tier_bank                 bank;
        std::unique_ptr<slot_map> map;
        std::vector<uint64_t>     seen_in;    // per expert: the step that used it last
        std::vector<uint64_t>     dropped_in; // per expert: the step in which it was among the dropped last
        std::vector<int32_t>      evicted;    // in this step; some are back
    };

    host_tier() = default;
    void tell_manager();
    void run(const hotmoe_tier_request & request);

    std::vector<state>                             states; // in the order of infos
    std::vector<hotmoe_tier_bank>                  infos;
    std::map<std::pair<int32_t, int32_t>, int32_t> index; // (layer, bank)
    hotmoe_tier_manager                            manager = {};
    page_advisor                                   advisor;
    int32_t                                        advisable = 0;
    int32_t                                        tensors   = 0;

    // the present step
    uint64_t                        step_no = 0;
    hotmoe_tier_step                step    = {};
    std::vector<hotmoe_tier_expert> used; // entered: it was not in tier 2 when the step began, until end_step
    std::vector<hotmoe_tier_expert> dropped;

    // scratch
    std::vector<hotmoe_tier_request> requests; // room for two about every expert
    std::vector<int32_t>             distinct;
    slot_event_result                result;
};
