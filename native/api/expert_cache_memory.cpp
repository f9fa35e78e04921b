// How much of which memory a cache takes: slots on devices, slots in host memory, room for waves; and taking it.

#include "copy_text.h"
#include "expert_cache.h"

#include "cache/error.h"
#include "store/host_memory.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

// A slot for what is left over of a wave's room.
static int32_t n_spare_of(const expert_pool & pool) {
    return pool.has_waves() ? 1 : 0;
}

void hotmoe_cache_impl::leave_out(ggml_backend_dev_t dev, const char * reason) {
    for (size_t i = 0; i < pools.size(); i++) {
        if (pools[i] && pools[i]->dev == dev) {
            plan_banks[i].state = HOTMOE_BANK_LEFT_OUT;
            copy_text(plan_banks[i].reason, reason);
            pools[i].reset();
        }
    }
}

int32_t hotmoe_cache_impl::open_streams(const hotmoe_cache_params & params) {
    const store_direct direct = params.direct == HOTMOE_DIRECT_ON ? store_direct::on : params.direct == HOTMOE_DIRECT_OFF ? store_direct::off :
                                                                                                                            store_direct::automatic;
    for (size_t i = 0; i < bank_tensors.size(); i++) {
        std::string                    error;
        std::unique_ptr<expert_stream> stream = expert_stream::create(bank_tensors[i], params.io_threads, direct, error);
        if (!error.empty()) {
            return hotmoe_fail(HOTMOE_ERR_STORE, "layer %d: %s", plan_banks[i].layer, error.c_str());
        }
        plan_banks[i].streamed = stream != nullptr;
        if (stream && !pools[i]) {
            return hotmoe_fail(HOTMOE_ERR_PLAN, "layer %d: its experts are streamed, so they need a pool: %s", plan_banks[i].layer, plan_banks[i].reason);
        }
        if (stream) {
            pools[i]->stream  = std::move(stream);
            pools[i]->overlap = !params.no_overlap;
        }
    }
    return HOTMOE_OK;
}

// Slots of the pools on one device.
int32_t hotmoe_cache_impl::size_device(ggml_backend_dev_t dev, const size_request & request, const device_memory & memory) {
    std::vector<size_t> index;
    for (size_t i = 0; i < pools.size(); i++) {
        if (pools[i] && pools[i]->dev == dev) {
            index.push_back(i);
        }
    }
    return size_banks(index, request, memory);
}

// Where streamed experts are to lie in host memory: the pools of the CPU's layers, and tier 2 of those on devices.
int32_t hotmoe_cache_impl::size_host_slots(llama_context * ctx, int32_t attempt) {
    std::vector<size_t> index;
    for (size_t i = 0; i < pools.size(); i++) {
        if (pools[i] && pools[i]->stream) {
            index.push_back(i);
        }
    }
    if (index.empty()) {
        return HOTMOE_OK;
    }
    // weights and context are there already; of the rest, most counts as free to the system until it is touched
    const hotmoe_plan_host needs = host_needs(ctx);
    host_compute_bytes           = std::max(host_compute_bytes, needs.compute_bytes);
    const uint64_t    untouched  = host_compute_bytes - taken_compute_bytes(ctx) + needs.wave_bytes + needs.reader_bytes;
    const host_memory now        = host_memory_now();
    device_memory     memory;
    memory.name     = HOST_SLOTS;
    memory.free     = now.available > untouched ? now.available - untouched : 0;
    memory.total    = now.total;
    memory.limit    = now.limit;
    memory.headroom = host_request.kind == size_request::automatic ? std::max<uint64_t>(now.total / 20, 64ull << 20) * (attempt + 1) : 0;
    return size_banks(index, host_request, memory);
}

// Give banks slots out of one memory: in their pools, or, of streamed ones whose pool is on a device, in tier 2.
int32_t hotmoe_cache_impl::size_banks(const std::vector<size_t> & index, const size_request & request, const device_memory & memory) {
    const bool             host = memory.name == HOST_SLOTS;
    std::vector<bank_cost> costs;
    for (const size_t i : index) {
        const expert_pool & pool = *pools[i];
        bank_cost           cost;
        cost.n_expert      = plan_banks[i].n_expert;
        cost.n_expert_used = plan_banks[i].n_expert_used;
        cost.slot_bytes    = plan_banks[i].expert_bytes;
        cost.fixed_bytes   = host && !pool.is_fed() ? host_slots::fixed_bytes(pool.host.size()) :
                                                      expert_pool::fixed_bytes(pool.host, ggml_backend_dev_buffer_type(pool.dev), n_spare_of(pool));
        costs.push_back(cost);
    }
    std::vector<int32_t> n_slots;
    std::string          error;
    if (!plan_slots(request, memory, costs, n_slots, error)) {
        return hotmoe_fail(HOTMOE_ERR_PLAN, "%s", error.c_str());
    }

    uint64_t needed = 0;
    for (size_t k = 0; k < index.size(); k++) {
        needed += n_slots[k] * costs[k].slot_bytes + costs[k].fixed_bytes;
    }
    if (host && needed > memory.free) { // host memory is granted first and found missing later, when the process is killed
        return hotmoe_fail(HOTMOE_ERR_PLAN, "host_slots \"%s\" takes %.1f MiB, but %.1f MiB of host memory are left%s%s: take fewer, or \"auto\"", request.text.c_str(),
                           needed / 1048576.0, memory.free / 1048576.0, memory.limit.empty() ? "" : " by the ", memory.limit.c_str());
    }

    hotmoe_plan_device row = {};
    copy_text(row.device, memory.name);
    copy_text(row.requested, request.text);
    row.n_banks        = (int32_t) index.size();
    row.host_memory    = host || computes_from_host_memory(pools[index[0]]->dev);
    row.free_bytes     = memory.free;
    row.headroom_bytes = memory.headroom;
    plan_devices.push_back(row);

    for (size_t k = 0; k < index.size(); k++) {
        hotmoe_plan_bank & b                                            = plan_banks[index[k]];
        (host && !pools[index[k]]->is_fed() ? b.host_slots : b.n_slots) = n_slots[k];
    }
    return HOTMOE_OK;
}

int32_t hotmoe_cache_impl::size_pools(const std::vector<size_request> & requests, int32_t attempt) {
    std::vector<ggml_backend_dev_t> devs; // in the order of their layers
    bool                            any_device = false; // one with memory of its own
    for (const auto & pool : pools) {
        if (pool && pool->is_fed()) {
            continue; // sized as host slots
        }
        if (pool && std::find(devs.begin(), devs.end(), pool->dev) == devs.end()) {
            devs.push_back(pool->dev);
            any_device = any_device || !computes_from_host_memory(pool->dev);
        }
    }
    const bool all_on_host = devs.empty(); // and streamed: `slots` has nothing to say
    if (!all_on_host && requests.size() != 1 && requests.size() != devs.size()) {
        std::string whole = requests[0].text;
        for (size_t i = 1; i < requests.size(); i++) {
            whole += "/" + requests[i].text;
        }
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "size \"%s\" has %zu values, but the experts run on %zu device(s): give one value, or one per device",
                           whole.c_str(), requests.size(), devs.size());
    }

    for (size_t d = 0; d < devs.size(); d++) {
        const size_request & request     = requests[requests.size() == 1 ? 0 : d];
        const bool           host_memory = computes_from_host_memory(devs[d]);
        const bool           automatic   = request.kind == size_request::automatic;

        if (host_memory && (automatic || (requests.size() == 1 && any_device))) {
            if (!any_device) {
                return hotmoe_fail(HOTMOE_ERR_PLAN, "%s computes from the same memory that holds the experts, so a pool there only costs copies: "
                                                    "\"auto\" leaves it off; load without an expert cache, or force a pool by giving its size",
                                   ggml_backend_dev_name(devs[d]));
            }
            leave_out(devs[d], "its device computes from the memory that holds the experts, a pool would only cost copies (a size per device forces one)");
            continue;
        }
        if (!automatic && request.value == 0) {
            for (size_t i = 0; i < pools.size(); i++) {
                if (pools[i] && pools[i]->stream && pools[i]->dev == devs[d]) {
                    return hotmoe_fail(HOTMOE_ERR_PLAN, "layer %d: its experts are streamed, so they need a pool on %s: size 0 leaves none", plan_banks[i].layer,
                                       ggml_backend_dev_name(devs[d]));
                }
            }
            leave_out(devs[d], "size 0 was asked for its device");
            continue;
        }

        device_memory memory;
        size_t        free  = 0;
        size_t        total = 0;
        ggml_backend_dev_memory(devs[d], &free, &total);
        memory.name     = ggml_backend_dev_name(devs[d]);
        memory.free     = free;
        memory.total    = total;
        memory.headroom = automatic ? default_headroom(total) * (attempt + 1) : 0;

        const int32_t status = size_device(devs[d], request, memory);
        if (status != HOTMOE_OK) {
            return status;
        }
    }
    return HOTMOE_OK;
}

// Make the policy and the admission of one tier of a bank; both, or none.
int32_t hotmoe_cache_impl::create_policies(const std::string & policy, const std::string & admission, const hotmoe_policy_config & config, hotmoe_policy & ranks,
                                           hotmoe_admission & judges) {
    int32_t status = hotmoe_policy_create(policy.c_str(), &config, &ranks);
    if (status != HOTMOE_OK) {
        return status;
    }
    status = hotmoe_admission_create(admission.c_str(), &config, &judges);
    if (status != HOTMOE_OK && ranks.free) {
        ranks.free(ranks.context);
    }
    wants_weights = wants_weights || ranks.wants_weights || judges.wants_weights;
    return status;
}

int32_t hotmoe_cache_impl::allocate_pools() {
    building.assign(pools.size(), replaced_ids());
    wants_weights = trace != nullptr;
    for (size_t i = 0; i < pools.size(); i++) {
        if (!pools[i]) {
            continue;
        }
        hotmoe_plan_bank &   b      = plan_banks[i];
        hotmoe_policy        ranks  = {};
        hotmoe_admission     judges = {};
        hotmoe_policy_config config = {};
        config.layer                = b.layer;
        config.bank                 = b.bank;
        config.n_expert             = b.n_expert;
        config.n_slots              = b.n_slots;

        int32_t status = create_policies(policy, admission, config, ranks, judges);
        if (status != HOTMOE_OK) {
            return status;
        }
        if (!pools[i]->allocate(b.n_slots, n_spare_of(*pools[i]), ranks, judges)) {
            return hotmoe_fail(HOTMOE_ERR_MEMORY, "%s: could not allocate the pool of layer %d (%d slots of %.2f MiB); ask for fewer slots, or for \"auto\"",
                               b.device, b.layer, b.n_slots, b.expert_bytes / 1048576.0);
        }
        b.pool_bytes = pools[i]->pool_bytes();
        if (b.host_slots > 0) {
            status = allocate_tier2(*pools[i], b);
            if (status != HOTMOE_OK) {
                return status;
            }
        }
        for (hotmoe_plan_device & d : plan_devices) {
            const bool from_host = pools[i]->is_fed();
            if (std::strcmp(d.device, HOST_SLOTS) == 0) {
                d.pool_bytes += from_host ? b.pool_bytes : b.host_bytes;
            } else if (std::strcmp(d.device, b.device) == 0 && !from_host) {
                d.pool_bytes += b.pool_bytes;
            }
        }
        for (ggml_tensor * t : pools[i]->host) {
            by_host[t] = { (int32_t) i, pools[i]->stand_in(t) };
        }
        by_table[pools[i]->table] = (int32_t) i;
        own_buffers.insert(pools[i]->table->buffer);
    }
    return HOTMOE_OK;
}

// Tier 2 of a bank, under a policy and an admission of its own.
int32_t hotmoe_cache_impl::allocate_tier2(expert_pool & pool, hotmoe_plan_bank & b) {
    hotmoe_policy        ranks  = {};
    hotmoe_admission     judges = {};
    hotmoe_policy_config config = {};
    config.layer                = b.layer;
    config.bank                 = b.bank;
    config.n_expert             = b.n_expert;
    config.n_slots              = b.host_slots;
    const int32_t status        = create_policies(host_policy, host_admission, config, ranks, judges);
    if (status != HOTMOE_OK) {
        return status;
    }
    // pinned where the device offers it: then uploads do not block
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(pool.dev);
    pool.tier2                      = host_slots::create(pool.host, b.host_slots, buft ? buft : ggml_backend_cpu_buffer_type(), ranks, judges);
    if (!pool.tier2) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "could not allocate the host slots of layer %d (%d slots of %.2f MiB); ask for fewer", b.layer, b.host_slots,
                           b.expert_bytes / 1048576.0);
    }
    b.host_bytes = pool.tier2->bytes();
    return HOTMOE_OK;
}

// What ubatches of a context need on each device to collect their results in waves.
std::map<ggml_backend_dev_t, hotmoe_cache_impl::wave_need> hotmoe_cache_impl::wave_needs(const llama_context * ctx) const {
    std::map<ggml_backend_dev_t, wave_need> needs;
    for (size_t i = 0; i < pools.size(); i++) {
        if (pools[i] && pools[i]->has_waves()) {
            wave_need & n = needs[pools[i]->dev];
            n.n_embd      = std::max(n.n_embd, pools[i]->n_embd());
            n.n_pairs     = std::max<int64_t>(n.n_pairs, (int64_t) plan_banks[i].n_expert_used * llama_n_ubatch(ctx));
        }
    }
    return needs;
}

int32_t hotmoe_cache_impl::allocate_waves(const llama_context * ctx) {
    wave_memories.clear();
    for (const auto & [dev, n] : wave_needs(ctx)) {
        if (!wave_memories[dev].allocate(dev, n.n_embd, n.n_pairs)) {
            return hotmoe_fail(HOTMOE_ERR_MEMORY, "%s: could not allocate %.2f MiB for ubatches that need more experts than there are slots; lower n_ubatch (%u)",
                               ggml_backend_dev_name(dev), wave_memory::bytes(n.n_embd, n.n_pairs) / 1048576.0, llama_n_ubatch(ctx));
        }
    }
    return HOTMOE_OK;
}
