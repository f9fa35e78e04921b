// The tier manager of a cache: made for the banks whose experts lie in host memory; the C functions of tier.h over a cache.

#include "expert_cache.h"

#include "cache/error.h"

#include "ggml-impl.h"

#include <algorithm>
#include <exception>

// Slots of tier 2 for each bank. "32s" is 32 slots.
static int32_t size_host(const char * text, std::vector<tier_bank> & banks) {
    std::string size = text ? text : "";
    if (size.empty() || size == "0") {
        for (tier_bank & b : banks) {
            b.info.host_slots = b.info.n_expert;
        }
        return HOTMOE_OK;
    }
    size_request request;
    std::string  error;
    if (!parse_host_size(text, request, error)) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s", error.c_str());
    }
    if (request.kind == size_request::automatic) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "host_slots \"auto\" is for streamed experts: a tier manager needs a number of slots, bytes, or no limit");
    }

    std::vector<bank_cost> costs;
    for (const tier_bank & b : banks) {
        bank_cost cost;
        cost.n_expert      = b.info.n_expert;
        cost.n_expert_used = b.info.host_slots; // see make_tier
        cost.slot_bytes    = b.info.expert_bytes;
        costs.push_back(cost);
    }
    device_memory host;
    host.name = "host_slots";
    std::vector<int32_t> n_slots;
    if (!plan_slots(request, host, costs, n_slots, error)) {
        return hotmoe_fail(HOTMOE_ERR_PLAN, "%s", error.c_str());
    }
    for (size_t i = 0; i < banks.size(); i++) {
        banks[i].info.host_slots = n_slots[i];
    }
    return HOTMOE_OK;
}

int32_t hotmoe_cache_impl::make_tier(const char * host_slots) {
    std::vector<tier_bank> banks;
    for (size_t i = 0; i < plan_banks.size(); i++) {
        tier_bank b;
        b.info.layer      = plan_banks[i].layer;
        b.info.bank       = plan_banks[i].bank;
        b.info.n_expert   = plan_banks[i].n_expert;
        b.info.host_slots = plan_banks[i].n_expert_used; // the least that will do, until it is sized
        for (const ggml_tensor * t : bank_tensors[i]) {
            if (t->buffer && t->data && ggml_backend_buffer_is_host(t->buffer)) {
                b.tensors.push_back({ (const char *) t->data, t->nb[2] });
                b.info.n_expert      = std::min(b.info.n_expert, (int32_t) t->ne[2]);
                b.info.expert_bytes += t->nb[2];
            }
        }
        if (!b.tensors.empty()) {
            banks.push_back(std::move(b));
        }
    }
    if (banks.empty()) {
        return hotmoe_fail(HOTMOE_ERR_PLAN, "tier manager \"%s\": no experts lie in host memory: keep them there with cpu_moe or n_cpu_moe, or leave the tier manager off",
                           tier_manager.c_str());
    }
    int32_t status = size_host(host_slots, banks);
    if (status == HOTMOE_OK) {
        status = host_tier::create(tier_manager.c_str(), banks, tier);
    }
    if (status != HOTMOE_OK) {
        return status;
    }
    const int32_t most  = std::max_element(banks.begin(), banks.end(), [](const auto & a, const auto & b) { return a.info.host_slots < b.info.host_slots; })->info.host_slots;
    uint64_t      bytes = 0;
    for (const tier_bank & b : banks) {
        bytes += b.info.expert_bytes * b.info.host_slots;
    }
    GGML_LOG_INFO("hotmoe: tier manager %s: host memory holds up to %d experts of each layer, %.2f MiB\n", tier_manager.c_str(), most, bytes / 1048576.0);
    if (!page_advisor::supported()) {
        GGML_LOG_WARN("hotmoe: tier manager %s: nothing can be advised about the page cache on this system, only on Linux: its requests are refused and counted\n",
                      tier_manager.c_str());
    } else if (tier->n_advisable() < tier->n_tensors()) {
        GGML_LOG_WARN("hotmoe: tier manager %s: %d of %d expert tensors do not lie in a mapped file (is mmap off?): requests for them are refused and counted\n",
                      tier_manager.c_str(), tier->n_tensors() - tier->n_advisable(), tier->n_tensors());
    }
    return HOTMOE_OK;
}

//
// the C functions
//

const char * hotmoe_cache_tier_manager(const hotmoe_cache * cache) {
    return cache ? cache->impl.tier_manager.c_str() : "";
}

int32_t hotmoe_tier_stats(hotmoe_cache * cache, hotmoe_tier_counters * out) {
    if (!cache || !out) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_tier_stats: cache and out must be set");
    }
    *out = {};
    if (host_tier * tier = cache->impl.tier.get()) {
        tier->end_step();
        *out = tier->counters;
    }
    return HOTMOE_OK;
}

int32_t hotmoe_tier_n_banks(const hotmoe_cache * cache) {
    return cache && cache->impl.tier ? (int32_t) cache->impl.tier->banks().size() : 0;
}

int32_t hotmoe_tier_get_bank(const hotmoe_cache * cache, int32_t i, hotmoe_tier_bank * out) {
    const int32_t n = hotmoe_tier_n_banks(cache);
    if (!out || i < 0 || i >= n) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "bank %d is not in [0, %d), or there is no tier manager", i, n);
    }
    *out = cache->impl.tier->banks()[i];
    return HOTMOE_OK;
}

int32_t hotmoe_tier_resident(const hotmoe_cache * cache, int32_t i, int32_t expert, uint64_t * bytes, uint64_t * resident) {
    hotmoe_tier_bank bank;
    const int32_t    status = hotmoe_tier_get_bank(cache, i, &bank);
    if (status != HOTMOE_OK) {
        return status;
    }
    if (!bytes || !resident || expert < 0 || expert >= bank.n_expert) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_tier_resident: expert %d is not in [0, %d), or bytes or resident is not set", expert, bank.n_expert);
    }
    try {
        if (cache->impl.tier->resident(i, expert, bytes, resident)) {
            return HOTMOE_OK;
        }
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "hotmoe_tier_resident: %s", e.what());
    }
    return hotmoe_fail(HOTMOE_ERR_STATE, "this system does not tell which pages are in the page cache");
}

//
// testing
//

void hotmoe_testing_round(uint64_t address, uint64_t size, int32_t advice, uint64_t page, uint64_t * begin, uint64_t * end) {
    const page_range r = round_to_pages((uintptr_t) address, (size_t) size, advice, (size_t) page);
    *begin             = r.begin;
    *end               = r.end;
}

int32_t hotmoe_testing_advise(const void * data, size_t size, int32_t advice, uint64_t * bytes) {
    try {
        page_advisor advisor;
        return advisor.advise(data, size, advice, bytes);
    } catch (const std::exception &) {
        return page_advisor::REFUSED;
    }
}
