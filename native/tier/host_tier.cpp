#include "host_tier.h"

#include "cache/error.h"
#include "policy/options.h"
#include "policy/policies.h"

#include <algorithm>
#include <chrono>
#include <exception>

using tier_clock = std::chrono::steady_clock;

static uint64_t ns_since(tier_clock::time_point from) {
    return (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(tier_clock::now() - from).count();
}

int32_t host_tier::create(const char * manager, const std::vector<tier_bank> & banks, std::unique_ptr<host_tier> & out) {
    std::unique_ptr<host_tier> tier(new host_tier());
    size_t                     n_requests = 0;
    for (const tier_bank & b : banks) {
        hotmoe_policy_config config = {};
        config.layer                = b.info.layer;
        config.bank                 = b.info.bank;
        config.n_expert             = b.info.n_expert;
        config.n_slots              = b.info.host_slots;
        policy_options none("");

        state s;
        s.bank = b;
        s.map  = std::make_unique<slot_map>(config.n_expert, config.n_slots, policy_lru_create(config, none));
        s.seen_in.assign(config.n_expert, 0);
        s.dropped_in.assign(config.n_expert, 0);
        tier->index[{ b.info.layer, b.info.bank }] = (int32_t) tier->states.size();
        tier->states.push_back(std::move(s));
        tier->infos.push_back(b.info);
        n_requests += HOTMOE_TIER_ADVICE_COUNT * (size_t) config.n_expert;
        for (const tier_tensor & t : b.tensors) {
            tier->tensors++;
            tier->advisable += tier->advisor.may_advise(t.data, t.expert_bytes * config.n_expert);
        }
    }
    tier->requests.resize(n_requests);

    hotmoe_tier_config config = {};
    config.n_banks            = (int32_t) tier->infos.size();
    config.banks              = tier->infos.data();
    const int32_t status      = hotmoe_tier_create(manager, &config, &tier->manager);
    if (status == HOTMOE_OK) {
        out = std::move(tier);
    }
    return status;
}

host_tier::~host_tier() {
    if (manager.free) {
        manager.free(manager.context);
    }
}

void host_tier::begin_step(const hotmoe_event & event) {
    step          = {};
    step.step     = event.step;
    step.phase    = event.phase;
    step.n_tokens = event.n_tokens;
    step_no++;
}

void host_tier::use(const hotmoe_event & event, const int32_t * ids, int64_t n) {
    const auto found = index.find({ event.layer, event.bank });
    if (found == index.end()) {
        return;
    }
    state & s = states[found->second];
    distinct.clear();
    for (int64_t i = 0; i < n; i++) {
        const int32_t id = ids[i];
        if (id >= 0 && id < s.bank.info.n_expert && s.seen_in[id] != step_no) {
            s.seen_in[id] = step_no;
            distinct.push_back(id);
            used.push_back({ event.layer, event.bank, id, s.map->slot_of(id) < 0 });
        }
    }
    // more experts than tier 2 holds: in the order of their use
    const size_t width = (size_t) s.map->n_slots();
    for (size_t at = 0; at < distinct.size(); at += width) {
        int32_t bad_id = 0;
        s.map->acquire(distinct.data() + at, nullptr, (int64_t) std::min(width, distinct.size() - at), event, result, &bad_id);
        s.evicted.insert(s.evicted.end(), result.evicted.begin(), result.evicted.end());
    }
}

void host_tier::end_step() {
    try {
        if (!used.empty()) {
            tell_manager();
        }
    } catch (const std::exception &) { // no memory
        counters.failed_steps++;
    }
    used.clear();
    dropped.clear();
    for (state & s : states) {
        s.evicted.clear();
    }
}

void host_tier::tell_manager() {
    for (hotmoe_tier_expert & e : used) {
        e.entered         = e.entered && states[index[{ e.layer, e.bank }]].map->slot_of(e.expert) >= 0;
        counters.entered += e.entered;
    }
    for (state & s : states) {
        for (const int32_t id : s.evicted) {
            if (s.map->slot_of(id) < 0 && s.dropped_in[id] != step_no) {
                s.dropped_in[id] = step_no;
                dropped.push_back({ s.bank.info.layer, s.bank.info.bank, id, 0 });
            }
        }
    }
    step.used      = used.data();
    step.n_used    = (int32_t) used.size();
    step.dropped   = dropped.data();
    step.n_dropped = (int32_t) dropped.size();

    counters.steps++;
    counters.used    += used.size();
    counters.dropped += dropped.size();

    const int32_t                room  = (int32_t) requests.size();
    const tier_clock::time_point start = tier_clock::now();
    const int32_t                n     = manager.on_step(manager.context, &step, requests.data(), room);
    counters.manager_ns               += ns_since(start);
    if (n < 0 || n > room) {
        counters.failed_steps++;
        return;
    }
    const tier_clock::time_point told = tier_clock::now();
    for (int32_t i = 0; i < n; i++) {
        run(requests[i]);
    }
    counters.advise_ns += ns_since(told);
}

void host_tier::run(const hotmoe_tier_request & request) {
    const auto found = index.find({ request.layer, request.bank });
    if (found == index.end() || request.advice < 0 || request.advice >= HOTMOE_TIER_ADVICE_COUNT || request.expert < 0 ||
        request.expert >= infos[found->second].n_expert) {
        counters.refused_requests++;
        return;
    }
    for (const tier_tensor & t : states[found->second].bank.tensors) {
        uint64_t                   bytes  = 0;
        const page_advisor::result result = advisor.advise(t.data + request.expert * t.expert_bytes, t.expert_bytes, request.advice, &bytes);
        if (result == page_advisor::REFUSED) {
            counters.refused_ranges++;
        } else if (bytes > 0) {
            counters.calls[request.advice]++;
            counters.bytes[request.advice]  += bytes;
            counters.errors[request.advice] += result == page_advisor::FAILED;
        }
    }
}

void host_tier::clear() {
    for (state & s : states) {
        s.map->clear();
        s.evicted.clear();
    }
    used.clear();
    if (manager.reset) {
        manager.reset(manager.context);
    }
}

bool host_tier::resident(int32_t i, int32_t expert, uint64_t * bytes, uint64_t * in_cache) const {
    *bytes = *in_cache = 0;
    for (const tier_tensor & t : states[i].bank.tensors) {
        uint64_t all  = 0;
        uint64_t here = 0;
        if (!advisor.resident(t.data + expert * t.expert_bytes, t.expert_bytes, &all, &here)) {
            return false;
        }
        *bytes    += all;
        *in_cache += here;
    }
    return true;
}
