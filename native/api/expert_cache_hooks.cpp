// What the cache answers to llama.cpp: while a graph is built, before it is computed, and at the anchors of its splits.

#include "expert_cache.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>

// Names of the nodes that anchor a split; the number of the bank follows.
static constexpr const char * SLOT_IDS_NAME = "hotmoe_slot_ids-";
static constexpr const char * OBSERVED_NAME = "hotmoe_observed_ids-";

void hotmoe_cache_impl::set_hooks() {
    hooks.user_data    = this;
    hooks.graph_begin  = [](void * ud, const void * graph, llama_expert_bypass bypass) { ((hotmoe_cache_impl *) ud)->graph_begin(graph, bypass); };
    hooks.router       = [](void * ud, ggml_tensor * ids, ggml_tensor * weights) { ((hotmoe_cache_impl *) ud)->router(ids, weights); };
    hooks.remap        = [](void * ud, ggml_context * c, ggml_tensor * w, ggml_tensor ** ids) { return ((hotmoe_cache_impl *) ud)->remap(c, w, ids); };
    hooks.ubatch_begin = [](void * ud, const void * graph, uint32_t n_tokens, uint32_t n_seqs) { ((hotmoe_cache_impl *) ud)->ubatch_begin(graph, n_tokens, n_seqs); };
    hooks.max_tokens   = [](void * ud, uint32_t n_ubatch) { return ((hotmoe_cache_impl *) ud)->max_tokens(n_ubatch); };
    hooks.context_free = [](void * ud) { ((hotmoe_cache_impl *) ud)->context_free(); };

    hooks.anchor.user_data = this;
    hooks.anchor.match     = [](void * ud, const ggml_tensor * node) { return ((hotmoe_cache_impl *) ud)->anchor_match(node); };
    hooks.anchor.run       = [](void * ud, const ggml_tensor * node, const ggml_tensor * src, ggml_backend_t src_backend, ggml_backend_t backend) {
        return ((hotmoe_cache_impl *) ud)->anchor_run(node, src, src_backend, backend);
    };
}

void hotmoe_cache_impl::graph_begin(const void * graph, llama_expert_bypass bypass) {
    current         = &graphs[graph];
    *current        = {};
    current->bypass = bypass;
    current->banks.resize(building.size());
    std::fill(building.begin(), building.end(), replaced_ids());
    router_last = {};

    if (bypass == LLAMA_EXPERT_BYPASS_CB_EVAL && !said_cb_eval) {
        said_cb_eval = true;
        GGML_LOG_WARN("hotmoe: the expert cache is off while an eval callback is set, since the callback would see slot ids\n");
    }
}

void hotmoe_cache_impl::router(ggml_tensor * ids, ggml_tensor * weights) {
    if (wants_weights && current && current->bypass == LLAMA_EXPERT_BYPASS_NONE) {
        ggml_set_output(weights); // its memory is not used again before the anchor has read it
        router_last = { ids, weights };
    }
}

ggml_tensor * hotmoe_cache_impl::remap(ggml_context * ctx, ggml_tensor * w, ggml_tensor ** ids) {
    const auto    it       = by_host.find(w);
    const int64_t n_used   = (*ids)->ne[0];
    const int64_t n_tokens = (*ids)->ne[1];
    if (it == by_host.end() || !current || n_used * n_tokens == 0) {
        return w;
    }
    const int32_t       bank = it->second.bank;
    const expert_pool * pool = it->second.stand_in ? pools[bank].get() : nullptr;

    replaced_ids & r = building[bank];
    if (r.ids != *ids) {
        current->banks[bank].n_used  = (int32_t) n_used;
        current->banks[bank].weights = router_last.ids == *ids ? router_last.by : nullptr;
    }

    int32_t reason = -1;
    if (current->bypass == LLAMA_EXPERT_BYPASS_WARMUP) {
        reason = HOTMOE_BYPASS_WARMUP;
    } else if (current->bypass == LLAMA_EXPERT_BYPASS_CB_EVAL) {
        reason = HOTMOE_BYPASS_CB_EVAL;
    } else if (pool && std::min<int64_t>(pool->map->n_expert(), n_used * n_tokens) > pool->map->n_slots()) {
        reason = HOTMOE_BYPASS_TOO_FEW_SLOTS;
    }
    if (reason >= 0 && pool) {
        std::vector<int32_t> & banks = current->bypassed[reason];
        if (banks.empty() || banks.back() != bank) { // once, not for each of its tensors
            banks.push_back(bank);
        }
    }
    if (reason >= 0 || !pool) {
        if (!observes() || current->bypass != LLAMA_EXPERT_BYPASS_NONE) {
            return w;
        }
        if (r.ids != *ids) {
            r = { *ids, observed_ids_of(ctx, bank, *ids) };
        }
        *ids = r.by;
        return w;
    }
    if (r.ids != *ids) {
        r = { *ids, slot_ids_of(ctx, *pool, bank, *ids) };
    }
    *ids = r.by;
    return it->second.stand_in;
}

ggml_tensor * hotmoe_cache_impl::slot_ids_of(ggml_context * ctx, const expert_pool & pool, int32_t bank, ggml_tensor * ids) {
    // The table must be the direct source: the scheduler looks at the buffer of src[0] to find out where the node
    // belongs, and a view has none. get_rows wants one list of rows, so only the ids are flattened.
    const int64_t n_used   = ids->ne[0];
    const int64_t n_tokens = ids->ne[1];
    if (n_tokens > 1) {
        ids = ggml_reshape_1d(ctx, ggml_is_contiguous(ids) ? ids : ggml_cont(ctx, ids), n_used * n_tokens);
    }
    ggml_tensor * rows = ggml_get_rows(ctx, pool.table, ids);
    ggml_format_name(rows, "%s%d", SLOT_IDS_NAME, bank);
    return ggml_reshape_2d(ctx, rows, n_used, n_tokens);
}

// The same ids, through a node that starts a split of its own: there they can be read.
ggml_tensor * hotmoe_cache_impl::observed_ids_of(ggml_context * ctx, int32_t bank, ggml_tensor * ids) {
    ggml_tensor * flat = ggml_is_contiguous(ids) ? ids : ggml_cont(ctx, ids); // read where they are contiguous
    ggml_tensor * copy = ggml_cont(ctx, flat);
    copy->src[1]       = flat; // which an anchor is told; cont itself does not look at it
    ggml_format_name(copy, "%s%d", OBSERVED_NAME, bank);
    return copy;
}

uint32_t hotmoe_cache_impl::max_tokens(uint32_t n_ubatch) const {
    if (observes()) {
        return n_ubatch; // every graph has a node of ours
    }
    uint32_t most = 0;
    for (size_t i = 0; i < pools.size(); i++) {
        if (pools[i]) {
            const hotmoe_plan_bank & b = plan_banks[i];
            most                       = std::max(most, b.n_slots == b.n_expert ? n_ubatch : (uint32_t) (b.n_slots / b.n_expert_used));
        }
    }
    return std::min(most, n_ubatch);
}

void hotmoe_cache_impl::ubatch_begin(const void * graph, uint32_t n_tokens, uint32_t n_seqs) {
    graph_info & info = graphs[graph];
    computing         = &info;

    event          = {};
    event.phase    = n_tokens > n_seqs ? HOTMOE_PHASE_PREFILL : HOTMOE_PHASE_DECODE;
    event.n_tokens = (int32_t) n_tokens;

    hotmoe_step_counters & s = steps[event.phase];
    if (info.bypass != LLAMA_EXPERT_BYPASS_WARMUP) {
        event.step = ++step;
        s.steps++;
        s.tokens       += n_tokens;
        s.graphs_built += info.fresh;
    }
    info.fresh = false;
    if (tier) {
        tier->end_step();
        tier->begin_step(event);
    }
    for (int32_t reason = 0; reason < HOTMOE_BYPASS_COUNT; reason++) {
        s.bypassed[reason] += !info.bypassed[reason].empty();
        for (const int32_t bank : info.bypassed[reason]) {
            pools[bank]->counters[event.phase].bypassed[reason]++;
        }
    }
}

static bool has_prefix(const ggml_tensor * node, const char * prefix) {
    return std::strncmp(node->name, prefix, std::strlen(prefix)) == 0;
}

bool hotmoe_cache_impl::anchor_match(const ggml_tensor * node) const {
    return (node->op == GGML_OP_GET_ROWS && by_table.find(node->src[0]) != by_table.end()) ||
        (observes() && node->op == GGML_OP_CONT && has_prefix(node, OBSERVED_NAME));
}

ggml_status hotmoe_cache_impl::anchor_run(const ggml_tensor * node, const ggml_tensor * src, ggml_backend_t src_backend, ggml_backend_t backend) {
    const bool    observes = node->op == GGML_OP_CONT;
    const int32_t bank     = std::atoi(node->name + std::strlen(observes ? OBSERVED_NAME : SLOT_IDS_NAME));
    if (bank < 0 || bank >= (int32_t) plan_banks.size() || !computing || (!observes && !pools[bank])) {
        GGML_LOG_ERROR("hotmoe: node %s belongs to no pool\n", node->name);
        return GGML_STATUS_FAILED;
    }
    try {
        event.layer = plan_banks[bank].layer;
        event.bank  = plan_banks[bank].bank;
        if (observes) {
            return observe(bank, src, src_backend);
        }
        expert_pool &     p      = *pools[bank];
        const graph_bank  routed = computing->banks[bank];
        const ggml_status status = p.run(src, routed.weights, src_backend, backend, event);
        if (status != GGML_STATUS_SUCCESS) {
            GGML_LOG_ERROR("hotmoe: layer %d: %s\n", p.layer, p.error.c_str());
        } else {
            tell(p.last_routing(), routed.n_used);
        }
        return status;
    } catch (const std::exception & e) {
        GGML_LOG_ERROR("hotmoe: layer %d: %s\n", event.layer, e.what());
        return GGML_STATUS_FAILED;
    }
}

ggml_status hotmoe_cache_impl::observe(int32_t bank, const ggml_tensor * src, ggml_backend_t backend) {
    const graph_bank routed = computing->banks[bank];
    std::string      error;
    if (!observed.read(src, routed.weights, backend, error)) {
        GGML_LOG_ERROR("hotmoe: layer %d: %s\n", event.layer, error.c_str());
        return GGML_STATUS_FAILED;
    }
    ggml_backend_synchronize(backend);
    tell(observed, routed.n_used);
    return GGML_STATUS_SUCCESS;
}

// Whoever wants to know the routing of the event.
void hotmoe_cache_impl::tell(const routing & r, int32_t n_used) {
    if (trace) {
        trace->add(event, r, n_used);
    }
    if (tier) {
        tier->use(event, r.ids.data(), (int64_t) r.ids.size());
    }
}

void hotmoe_cache_impl::context_free() {
    if (tier) {
        tier->end_step(); // the model still lives
    }
    context = nullptr;
}
