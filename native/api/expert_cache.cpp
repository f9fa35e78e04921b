#include "expert_cache.h"

#include "cache/error.h"
#include "store/host_memory.h"

#include "ggml-impl.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

// Expert tensors by the name after "blk.N.", and the bank of their layer that they belong to. Matches LLM_TENSOR_FFN_*EXPS.
static const struct {
    const char * name;
    int32_t      bank;
} expert_tensor_names[] = {
    { "ffn_gate_exps.weight", 0 },
    { "ffn_up_exps.weight", 0 },
    { "ffn_gate_up_exps.weight", 0 },
    { "ffn_down_exps.weight", 0 },
    { "ffn_gate_chexps.weight", 1 },
    { "ffn_up_chexps.weight", 1 },
    { "ffn_down_chexps.weight", 1 },
};

template <size_t N> static void copy_text(char (&to)[N], const std::string & from) {
    std::snprintf(to, N, "%s", from.c_str());
}

hotmoe_cache_impl::~hotmoe_cache_impl() {
    if (context) {
        if (tier) {
            tier->end_step();
        }
        llama_expert_attach(context, nullptr);
    }
}

//
// attach
//

int32_t hotmoe_cache_impl::attach(llama_context * ctx, const hotmoe_cache_params & params) {
    policy    = params.policy ? params.policy : hotmoe_policy_default();
    admission = params.admission ? params.admission : hotmoe_admission_default();
    if (params.record) {
        trace = std::make_unique<trace_buffer>();
    }
    if (params.tier_manager && std::strcmp(params.tier_manager, "none") != 0) {
        tier_manager = params.tier_manager;
    }

    std::vector<size_request> requests;
    std::string               error;
    const char *              size = params.slots ? params.slots : "auto";
    if (!parse_host_size(params.host_slots && *params.host_slots && std::strcmp(params.host_slots, "0") != 0 ? params.host_slots : "auto", host_request, error)) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s", error.c_str());
    }
    const bool no_pools = (params.record || !tier_manager.empty()) && std::strcmp(size, "0") == 0;
    if (!no_pools && !parse_size_list(size, requests, error)) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s", error.c_str());
    }
    const bool any_auto = std::any_of(requests.begin(), requests.end(), [](const size_request & r) { return r.kind == size_request::automatic; });

    set_hooks();

    // The graphs' compute buffers change with the pool: only reserving them with the pool in place tells whether they fit
    // beside it. "auto" gives way until they do, or until not even the smallest pool does.
    for (int32_t attempt = 0;; attempt++) {
        int32_t status = find_banks(llama_get_model(ctx), no_pools);
        if (status == HOTMOE_OK) {
            status = open_streams(params);
        }
        if (status == HOTMOE_OK && !no_pools) {
            status = size_pools(requests, attempt);
        }
        if (status == HOTMOE_OK && !no_pools) {
            status = size_host_slots(ctx, attempt);
        }
        if (status == HOTMOE_OK && params.strict) {
            status = check_strict();
        }
        if (status == HOTMOE_OK) {
            status = allocate_pools();
        }
        if (status == HOTMOE_OK) {
            status = allocate_waves(ctx);
        }
        if (status == HOTMOE_OK && !tier_manager.empty() && !tier) {
            status = make_tier(params.host_slots);
        }
        if (status == HOTMOE_OK) {
            status = attach_hooks(ctx);
        }
        if (status == HOTMOE_OK) {
            break;
        }
        if (status != HOTMOE_ERR_MEMORY || !any_auto) {
            return status;
        }
    }
    reset_stats();
    context = ctx;
    log_plan(llama_n_seq_max(ctx));
    return HOTMOE_OK;
}

int32_t hotmoe_cache_impl::attach_hooks(llama_context * ctx) {
    switch (llama_expert_attach(ctx, &hooks)) {
        case LLAMA_EXPERT_ATTACH_OK:
            return HOTMOE_OK;
        case LLAMA_EXPERT_ATTACH_BUSY:
            return hotmoe_fail(HOTMOE_ERR_STATE, "the context has an expert cache already: free it first");
        case LLAMA_EXPERT_ATTACH_NO_MEMORY:
            break;
    }
    return hotmoe_fail(HOTMOE_ERR_MEMORY, "the pool fits, but not the compute buffers of the graphs beside it: ask for fewer slots, or for \"auto\", or lower n_ubatch");
}

int32_t hotmoe_cache_impl::check_strict() const {
    for (const hotmoe_plan_bank & b : plan_banks) {
        if (b.state != HOTMOE_BANK_POOLED) {
            return hotmoe_fail(HOTMOE_ERR_PLAN, "layer %d cannot be pooled: %s (allowed without strict)", b.layer, b.reason);
        }
    }
    return HOTMOE_OK;
}

// Why these tensors cannot be pooled on dev; "" if they can.
static std::string why_not(const std::vector<ggml_tensor *> & tensors, ggml_backend_dev_t dev) {
    const int64_t n_expert = tensors[0]->ne[2];
    for (const ggml_tensor * t : tensors) {
        if (!t->buffer || !t->data) {
            return "the weights are not loaded";
        }
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(t->buffer);
        if (!ggml_backend_buffer_is_host(t->buffer)) {
            ggml_backend_dev_t at = ggml_backend_buft_get_device(buft);
            if (at && ggml_backend_dev_type(at) == GGML_BACKEND_DEVICE_TYPE_CPU) {
                return std::string("the experts were repacked for the CPU (") + ggml_backend_buft_name(buft) +
                    "); load the model with hotmoe, or with use_extra_bufts = false";
            }
            return std::string("the experts are in device memory already (") + ggml_backend_buft_name(buft) +
                "); keep them in host memory with cpu_moe or n_cpu_moe";
        }
        if (t->ne[2] != n_expert) {
            return "its expert tensors hold different numbers of experts";
        }
        if (!ggml_is_contiguous(t)) {
            return "its expert tensors are not contiguous";
        }
    }

    // would the device run the two ops that the remap needs?
    ggml_init_params params = {};
    params.mem_size         = 16 * ggml_tensor_overhead();
    params.no_alloc         = true;
    ggml_context_ptr ctx(ggml_init(params));
    ggml_tensor *    table = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, n_expert);
    ggml_tensor *    ids   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
    ggml_tensor *    rows  = ggml_get_rows(ctx.get(), table, ids);
    if (!ggml_backend_dev_supports_op(dev, rows)) {
        return std::string(ggml_backend_dev_name(dev)) + " cannot run get_rows on 32-bit integers";
    }
    for (const ggml_tensor * t : tensors) {
        ggml_tensor * w = ggml_new_tensor_3d(ctx.get(), t->type, t->ne[0], t->ne[1], t->ne[2]);
        ggml_tensor * x = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, t->ne[0], 1, 1);
        if (!ggml_backend_dev_supports_op(dev, ggml_mul_mat_id(ctx.get(), w, x, ids))) {
            return std::string(ggml_backend_dev_name(dev)) + " cannot run mul_mat_id on " + ggml_type_name(t->type);
        }
    }
    return "";
}

static uint64_t pinned_bytes_of(const std::vector<ggml_tensor *> & tensors, ggml_backend_dev_t dev) {
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(dev);
    uint64_t                   bytes  = 0;
    for (const ggml_tensor * t : tensors) {
        bytes += pinned && t->buffer && ggml_backend_buffer_get_type(t->buffer) == pinned ? ggml_nbytes(t) : 0;
    }
    return bytes;
}

int32_t hotmoe_cache_impl::find_banks(const llama_model * model, bool no_pools) {
    plan_banks.clear();
    plan_devices.clear();
    bank_tensors.clear();
    by_host.clear();
    by_table.clear();
    own_buffers.clear();
    graphs.clear();
    current   = nullptr;
    computing = nullptr;
    pools.clear(); // frees what an earlier attempt allocated

    struct found {
        ggml_backend_dev_t         dev    = nullptr;
        int32_t                    n_used = 0;
        std::vector<ggml_tensor *> tensors;
    };
    std::map<std::pair<int32_t, int32_t>, found> banks; // (layer, bank)

    llama_expert_for_each_tensor(model, [](void * ud, const char * name, ggml_tensor * tensor, const llama_expert_layer * layer) {
        auto & banks = *(std::map<std::pair<int32_t, int32_t>, found> *) ud;
        const char * suffix = std::strchr(name + std::strlen("blk."), '.');
        for (const auto & row : expert_tensor_names) {
            if (suffix && std::strcmp(suffix + 1, row.name) == 0) {
                found & f = banks[{ layer->il, row.bank }];
                f.dev    = layer->dev;
                f.n_used = layer->n_expert_used;
                f.tensors.push_back(tensor);
            }
        } }, &banks);

    if (banks.empty()) {
        return hotmoe_fail(HOTMOE_ERR_PLAN, "the model has no expert tensors (or only its vocabulary was loaded), so there is nothing to pool: load it without an expert cache");
    }

    bool any = false;
    for (auto & [key, f] : banks) {
        hotmoe_plan_bank b       = {};
        auto             pool    = std::make_unique<expert_pool>(key.first, key.second, f.dev, f.tensors);
        b.layer                  = key.first;
        b.bank                   = key.second;
        b.n_expert               = (int32_t) f.tensors[0]->ne[2];
        b.n_expert_used          = std::max(1, std::min(f.n_used, b.n_expert));
        b.n_tensors              = (int32_t) f.tensors.size();
        b.expert_bytes           = pool->expert_bytes();
        b.pinned_bytes           = pinned_bytes_of(f.tensors, f.dev);
        const std::string reason = no_pools ? "no pool was asked for" : why_not(f.tensors, f.dev);
        for (ggml_tensor * t : f.tensors) {
            by_host[t] = { (int32_t) plan_banks.size(), nullptr };
        }
        b.state = reason.empty() ? HOTMOE_BANK_POOLED : HOTMOE_BANK_LEFT_OUT;
        copy_text(b.device, ggml_backend_dev_name(f.dev));
        copy_text(b.reason, reason);
        any = any || reason.empty();
        plan_banks.push_back(b);
        bank_tensors.push_back(f.tensors);
        pools.push_back(reason.empty() ? std::move(pool) : nullptr);
    }
    if (!any && !no_pools) {
        return hotmoe_fail(HOTMOE_ERR_PLAN, "nothing to pool: layer %d: %s", plan_banks[0].layer, plan_banks[0].reason);
    }
    return HOTMOE_OK;
}

static constexpr const char * HOST_SLOTS = "host slots"; // in the plan

static bool computes_from_host_memory(ggml_backend_dev_t dev) {
    const enum ggml_backend_dev_type type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_CPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

// A slot for what is left over of a wave's room, where the kernels want one.
static int32_t n_spare_of(const expert_pool & pool) {
    return pool.has_waves() && ggml_backend_dev_type(pool.dev) != GGML_BACKEND_DEVICE_TYPE_CPU ? 1 : 0;
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
int32_t hotmoe_cache_impl::size_host_slots(const llama_context * ctx, int32_t attempt) {
    std::vector<size_t> index;
    for (size_t i = 0; i < pools.size(); i++) {
        if (pools[i] && pools[i]->stream) {
            index.push_back(i);
        }
    }
    if (index.empty()) {
        return HOTMOE_OK;
    }
    // what the context has allocated and not touched yet counts as free to the system
    uint64_t untouched = 0;
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx)) {
        untouched += ggml_backend_buft_is_host(buft) ? bytes.compute : 0;
    }
    for (const auto & [dev, n] : wave_needs(ctx)) {
        untouched += computes_from_host_memory(dev) ? wave_memory::bytes(n.n_embd, n.n_pairs) : 0;
    }
    const host_memory now = host_memory_now();
    device_memory     memory;
    memory.name     = HOST_SLOTS;
    memory.free     = now.available > untouched ? now.available - untouched : 0;
    memory.total    = now.total;
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
        if (!host || computes_from_host_memory(pool.dev)) {
            cost.fixed_bytes = expert_pool::fixed_bytes(pool.host, ggml_backend_dev_buffer_type(pool.dev), n_spare_of(pool));
        }
        costs.push_back(cost);
    }
    std::vector<int32_t> n_slots;
    std::string          error;
    if (!plan_slots(request, memory, costs, n_slots, error)) {
        return hotmoe_fail(HOTMOE_ERR_PLAN, "%s", error.c_str());
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
        hotmoe_plan_bank & b                                                                  = plan_banks[index[k]];
        (host && !computes_from_host_memory(pools[index[k]]->dev) ? b.host_slots : b.n_slots) = n_slots[k];
    }
    return HOTMOE_OK;
}

int32_t hotmoe_cache_impl::size_pools(const std::vector<size_request> & requests, int32_t attempt) {
    std::vector<ggml_backend_dev_t> devs; // in the order of their layers
    bool                            any_device = false; // one with memory of its own
    for (const auto & pool : pools) {
        if (pool && pool->stream && computes_from_host_memory(pool->dev)) {
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

        int32_t status = hotmoe_policy_create(policy.c_str(), &config, &ranks);
        if (status != HOTMOE_OK) {
            return status;
        }
        status = hotmoe_admission_create(admission.c_str(), &config, &judges);
        if (status != HOTMOE_OK) {
            if (ranks.free) {
                ranks.free(ranks.context);
            }
            return status;
        }
        wants_weights = wants_weights || ranks.wants_weights || judges.wants_weights;
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
            const bool from_host = b.streamed && computes_from_host_memory(pools[i]->dev);
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

// Tier 2 of a bank: under the same policy as tier 1, every expert that is read may stay.
int32_t hotmoe_cache_impl::allocate_tier2(expert_pool & pool, hotmoe_plan_bank & b) {
    hotmoe_policy        ranks  = {};
    hotmoe_policy_config config = {};
    config.layer                = b.layer;
    config.bank                 = b.bank;
    config.n_expert             = b.n_expert;
    config.n_slots              = b.host_slots;
    const int32_t status        = hotmoe_policy_create("lru", &config, &ranks);
    if (status != HOTMOE_OK) {
        return status;
    }
    // pinned where the device offers it: then uploads do not block
    ggml_backend_buffer_type_t buft = ggml_backend_dev_host_buffer_type(pool.dev);
    pool.tier2                      = host_slots::create(pool.host, b.host_slots, buft ? buft : ggml_backend_cpu_buffer_type(), ranks, {});
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

void hotmoe_cache_impl::log_plan(uint32_t n_seq_max) const {
    for (const hotmoe_plan_device & d : plan_devices) {
        GGML_LOG_INFO("hotmoe: expert cache on %s: %d expert banks pooled, %.2f MiB (asked: %s, free before: %.2f MiB), policy %s, admission %s%s\n", d.device,
                      d.n_banks, d.pool_bytes / 1048576.0, d.requested, d.free_bytes / 1048576.0, policy.c_str(), admission.c_str(),
                      d.host_memory ? "; forced: this device computes from host memory" : "");
    }
    for (size_t i = 0; i < plan_banks.size(); i++) {
        const hotmoe_plan_bank & b = plan_banks[i];
        if (b.state != HOTMOE_BANK_POOLED && plan_devices.empty()) {
            continue; // no pools were asked for
        }
        if (b.state != HOTMOE_BANK_POOLED) {
            GGML_LOG_WARN("hotmoe: layer %d is left out of the expert cache: %s\n", b.layer, b.reason);
            continue;
        }
        if (!b.streamed && n_seq_max > 1 && (int64_t) n_seq_max * b.n_expert_used > b.n_slots && b.n_expert > b.n_slots) {
            GGML_LOG_WARN("hotmoe: layer %d: %d slots serve %d sequences at once, the context allows %u: larger batches take the stock path\n", b.layer,
                          b.n_slots, b.n_slots / b.n_expert_used, n_seq_max);
        }
        GGML_LOG_INFO("hotmoe: layer %3d%s: %d of %d experts (%d used per token), %.2f MiB each, %.2f MiB on %s\n", b.layer,
                      b.bank ? " (second bank)" : "", b.n_slots, b.n_expert, b.n_expert_used, b.expert_bytes / 1048576.0,
                      b.pool_bytes / 1048576.0, b.device);
    }
}

//
// state
//

void hotmoe_cache_impl::synchronize() const {
    if (context) {
        llama_synchronize(context);
    }
}

void hotmoe_cache_impl::clear() {
    synchronize();
    for (const auto & pool : pools) {
        if (pool) {
            pool->map->clear();
            if (pool->tier2) {
                pool->tier2->clear();
            }
        }
    }
    if (tier) {
        tier->clear();
    }
}

void hotmoe_cache_impl::reset_stats() {
    for (const auto & pool : pools) {
        for (int32_t phase = 0; pool && phase < HOTMOE_PHASE_COUNT; phase++) {
            pool->counters[phase] = {};
        }
    }
    for (hotmoe_step_counters & s : steps) {
        s = {};
    }
    for (const auto & pool : pools) {
        if (pool && pool->stream) {
            store_base = pool->stream->pool().counters(); // shared readers count on
        }
        if (pool && pool->tier2) {
            pool->tier2->hits = pool->tier2->misses = pool->tier2->evictions = 0;
        }
    }
    if (tier) {
        tier->end_step();
        tier->counters = {};
    }
}

void hotmoe_cache_impl::set_fault(int32_t fault) {
    for (const auto & pool : pools) {
        if (pool) {
            pool->fault = fault;
        }
    }
}

hotmoe_store_counters hotmoe_cache_impl::store_stats() const {
    hotmoe_store_counters out   = {};
    const reader_pool *   first = nullptr;
    for (const auto & pool : pools) {
        if (pool && pool->stream && !first) {
            first                  = &pool->stream->pool();
            const store_counters c = first->counters();
            out.reads              = c.reads - store_base.reads;
            out.bytes              = c.bytes - store_base.bytes;
            out.disk_bytes         = c.disk_bytes - store_base.disk_bytes;
            out.direct_bytes       = c.direct_bytes - store_base.direct_bytes;
            out.buffered_bytes     = c.buffered_bytes - store_base.buffered_bytes;
            out.retries            = c.retries - store_base.retries;
            out.errors             = c.errors - store_base.errors;
            out.read_ns            = c.read_ns - store_base.read_ns;
            out.wait_ns            = c.wait_ns - store_base.wait_ns;
        }
        if (pool && pool->tier2) {
            out.host_hits      += pool->tier2->hits;
            out.host_misses    += pool->tier2->misses;
            out.host_evictions += pool->tier2->evictions;
        }
    }
    return out;
}

std::string hotmoe_cache_impl::store_warning() const {
    for (const auto & pool : pools) {
        if (pool && pool->stream) {
            return pool->stream->pool().warning();
        }
    }
    return "";
}
