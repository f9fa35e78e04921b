#include "copy_text.h"
#include "expert_cache.h"

#include "cache/error.h"
#include "store/host_memory.h"

#include "ggml-impl.h"

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
    // the same defaults: see bench/host_tier.md
    host_policy    = params.host_policy ? params.host_policy : hotmoe_policy_default();
    host_admission = params.host_admission ? params.host_admission : hotmoe_admission_default();
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
    for (int32_t attempt = 0;;) {
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
        if (status == HOTMOE_OK) {
            status = check_tier2(params);
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
            context   = ctx; // from here on it has our hooks
            plan_host = host_needs(ctx);
            if (!streams() || plan_host.compute_bytes <= host_compute_bytes) {
                break;
            }
            // more than was left for them: experts that the CPU computes now were to be copied to a device, for example
            host_compute_bytes = plan_host.compute_bytes;
            llama_expert_attach(ctx, nullptr);
            context = nullptr;
            continue;
        }
        if (status != HOTMOE_ERR_MEMORY || !any_auto) {
            return status;
        }
        attempt++;
    }
    reset_stats();
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

bool hotmoe_cache_impl::has_tier2() const {
    return std::any_of(plan_banks.begin(), plan_banks.end(), [](const hotmoe_plan_bank & b) { return b.host_slots > 0; });
}

// Whether there is something that tier 2's policy and admission could be about.
int32_t hotmoe_cache_impl::check_tier2(const hotmoe_cache_params & params) const {
    if ((!params.host_policy && !params.host_admission) || has_tier2()) {
        return HOTMOE_OK;
    }
    const bool   is_policy = params.host_policy != nullptr;
    const char * what      = is_policy ? "policy" : "admission";
    const char * given     = is_policy ? params.host_policy : params.host_admission;
    return streams() ? hotmoe_fail(HOTMOE_ERR_ARGUMENT, "host_%s \"%s\": the experts are computed from host memory, so the host slots are the pool, and there is no "
                                                        "tier behind it: give it as %s",
                                   what, given, what) :
                       hotmoe_fail(HOTMOE_ERR_ARGUMENT, "host_%s \"%s\" is about streamed experts behind a device's slots, and none are streamed: load the model "
                                                        "with its experts streamed, or leave it out",
                                   what, given);
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
    if (!pools.empty()) { // what an earlier attempt allocated
        pools.clear();
        wave_memories.clear();
        host_memory_trim();
    }

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

void hotmoe_cache_impl::log_plan(uint32_t n_seq_max) const {
    for (const auto & pool : pools) {
        if (pool && pool->stream) {
            GGML_LOG_INFO("hotmoe: experts are read from the model's files when they are needed, by %d threads; nothing of the model is mapped\n",
                          pool->stream->pool().n_threads());
            break;
        }
    }
    for (const hotmoe_plan_device & d : plan_devices) {
        GGML_LOG_INFO("hotmoe: expert cache on %s: %d expert banks pooled, %.2f MiB (asked: %s, free before: %.2f MiB)%s\n", d.device, d.n_banks,
                      d.pool_bytes / 1048576.0, d.requested, d.free_bytes / 1048576.0, d.host_memory ? "; forced: this device computes from host memory" : "");
    }
    if (!plan_devices.empty()) {
        GGML_LOG_INFO("hotmoe: policy %s, admission %s\n", policy.c_str(), admission.c_str());
    }
    if (has_tier2()) {
        GGML_LOG_INFO("hotmoe: host memory behind devices: policy %s, admission %s\n", host_policy.c_str(), host_admission.c_str());
    }
    const hotmoe_plan_host & h = plan_host;
    GGML_LOG_INFO("hotmoe: host memory: %.2f MiB (slots %.2f, weights %.2f, context %.2f, compute %.2f, waves %.2f, readers %.2f), and %.2f MiB of weights mapped\n",
                  h.total_bytes / 1048576.0, h.slot_bytes / 1048576.0, h.weight_bytes / 1048576.0, h.context_bytes / 1048576.0, h.compute_bytes / 1048576.0,
                  h.wave_bytes / 1048576.0, h.reader_bytes / 1048576.0, h.mapped_bytes / 1048576.0);
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
            pool->tier2->count = {};
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
            const host_slots::counters & c = pool->tier2->count;
            out.host_hits                 += c.hits;
            out.host_misses               += c.misses;
            out.host_evictions            += c.evictions;
            out.host_not_admitted         += c.not_admitted;
            out.host_policy_fallbacks     += c.policy_fallbacks;
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
