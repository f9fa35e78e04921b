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
static constexpr const char * WAVE_IDS_NAME = "hotmoe_wave_ids-"; // a wave begins
static constexpr const char * MERGED_NAME   = "hotmoe_merged-";   // ... and has ended

void hotmoe_cache_impl::set_hooks() {
    hooks.user_data   = this;
    hooks.graph_begin = [](void * ud, const void * graph, llama_expert_bypass bypass) { ((hotmoe_cache_impl *) ud)->graph_begin(graph, bypass); };
    hooks.router      = [](void * ud, ggml_tensor * ids, ggml_tensor * weights) { ((hotmoe_cache_impl *) ud)->router(ids, weights); };
    hooks.remap       = [](void * ud, ggml_context * c, ggml_tensor * w, ggml_tensor ** ids) { return ((hotmoe_cache_impl *) ud)->remap(c, w, ids); };
    hooks.route       = [](void * ud, ggml_context * c, ggml_tensor * w, ggml_tensor ** input, ggml_tensor ** ids) {
        ((hotmoe_cache_impl *) ud)->route(c, w, input, ids);
    };
    hooks.merge        = [](void * ud, ggml_context * c, ggml_tensor * experts) { return ((hotmoe_cache_impl *) ud)->merge(c, experts); };
    hooks.ubatch_begin = [](void * ud, const void * graph, uint32_t n_tokens, uint32_t n_seqs) { ((hotmoe_cache_impl *) ud)->ubatch_begin(graph, n_tokens, n_seqs); };
    hooks.max_tokens   = [](void * ud, uint32_t n_ubatch) { return ((hotmoe_cache_impl *) ud)->max_tokens(n_ubatch); };
    hooks.context_free = [](void * ud) { ((hotmoe_cache_impl *) ud)->context_free(); };

    hooks.anchor.user_data = this;
    hooks.anchor.match     = [](void * ud, const ggml_tensor * node) { return ((hotmoe_cache_impl *) ud)->anchor_match(node); };
    hooks.anchor.run       = [](void * ud, const ggml_tensor * node, const ggml_tensor * src, ggml_backend_t src_backend, ggml_backend_t backend, bool * again) {
        return ((hotmoe_cache_impl *) ud)->anchor_run(node, src, src_backend, backend, again);
    };
    hooks.anchor.stays = [](void * ud, const ggml_tensor * weight) { return ((hotmoe_cache_impl *) ud)->owns(weight); };
}

void hotmoe_cache_impl::graph_begin(const void * graph, llama_expert_bypass bypass) {
    current         = &graphs[graph];
    *current        = {};
    current->bypass = bypass;
    current->banks.resize(building.size());
    std::fill(building.begin(), building.end(), replaced_ids());
    router_last = {};
    wave_bank   = -1;

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
    if (wave_bank == bank && r.ids == *ids) {
        *ids = r.by;
        return it->second.stand_in;
    }
    if (r.ids != *ids) {
        current->banks[bank].n_used  = (int32_t) n_used;
        current->banks[bank].weights = router_last.ids == *ids ? router_last.by : nullptr;
    }

    if (pool && pool->stream) { // there is no other path for it
        if (r.ids != *ids) {
            r = { *ids, slot_ids_of(ctx, *pool, bank, *ids) };
        }
        *ids = r.by;
        return it->second.stand_in;
    }

    int32_t reason = -1;
    if (current->bypass == LLAMA_EXPERT_BYPASS_WARMUP) {
        reason = HOTMOE_BYPASS_WARMUP;
    } else if (current->bypass == LLAMA_EXPERT_BYPASS_CB_EVAL) {
        reason = HOTMOE_BYPASS_CB_EVAL;
    } else if (pool && !pool->fits(n_used * n_tokens)) {
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

// Lets the matmuls of a block see the pairs of one wave at a time, which is written before each, instead of all.
void hotmoe_cache_impl::route(ggml_context * ctx, ggml_tensor * w, ggml_tensor ** input, ggml_tensor ** ids) {
    const auto    it       = by_host.find(w);
    const int64_t n_used   = (*ids)->ne[0];
    const int64_t n_tokens = (*ids)->ne[1];
    if (it == by_host.end() || !it->second.stand_in || !current || n_used * n_tokens == 0) {
        return;
    }
    const int32_t       bank = it->second.bank;
    const expert_pool & pool = *pools[bank];
    if (!pool.has_waves() || (pool.fits(n_used * n_tokens) && current->bypass != LLAMA_EXPERT_BYPASS_WARMUP)) {
        return;
    }
    graph_bank &  g    = current->banks[bank];
    const int64_t room = pool.wave_room(n_used, n_tokens);
    wave_tensors  wave;
    if (!wave_memories[pool.dev].tensors(ctx, pool.n_embd(), n_used * n_tokens, room, wave)) {
        return; // larger than any ubatch of the context: without waves it fails, and says so
    }
    g.wave    = wave;
    g.n_used  = (int32_t) n_used;
    g.weights = router_last.ids == *ids ? router_last.by : nullptr;
    g.by_pair = (*input)->ne[1] == n_used && n_used > 1;

    // The wave begins with the node that tells which rows of the input it takes. An anchor is told src[1].
    ggml_tensor * flat  = ggml_is_contiguous(*ids) ? *ids : ggml_cont(ctx, *ids);
    ggml_tensor * begin = ggml_cont(ctx, g.wave.sources);
    begin->src[1]       = flat;
    ggml_format_name(begin, "%s%d", WAVE_IDS_NAME, bank);

    ggml_tensor * whole = ggml_is_contiguous(*input) ? *input : ggml_cont(ctx, *input);
    ggml_tensor * rows  = ggml_reshape_2d(ctx, whole, whole->ne[0], ggml_nelements(whole) / whole->ne[0]);

    wave_bank      = bank;
    wave_route     = { whole, *ids, flat };
    building[bank] = { g.wave.experts, g.wave.slots };
    *input         = ggml_reshape_3d(ctx, ggml_get_rows(ctx, rows, begin), whole->ne[0], 1, room);
    *ids           = g.wave.experts;
}

// Copies each row of a wave to its place.
ggml_tensor * hotmoe_cache_impl::merge(ggml_context * ctx, ggml_tensor * experts) {
    if (wave_bank < 0) {
        return experts;
    }
    graph_bank &  g        = current->banks[wave_bank];
    const int64_t n_embd   = experts->ne[0];
    const int64_t n_tokens = wave_route.ids->ne[1];

    ggml_tensor * rows = ggml_reshape_2d(ctx, ggml_is_contiguous(experts) ? experts : ggml_cont(ctx, experts), n_embd, ggml_nelements(g.wave.sources));
    ggml_tensor * all  = ggml_set_rows(ctx, g.wave.results, rows, g.wave.rows);

    // Where the next wave begins, if there is one. What a wave reads must still be there for it: the sources make the allocator
    // keep it. An anchor is told src[1].
    ggml_tensor * end = ggml_cont(ctx, ggml_view_1d(ctx, all, 1, 0));
    end->src[1]       = wave_route.flat;
    end->src[2]       = wave_route.input;
    end->src[3]       = wave_route.ids;
    ggml_format_name(end, "%s%d", MERGED_NAME, wave_bank);

    // The results where they are: what reads them comes after `end`, which is why that is a source, and before the next layer
    // writes there.
    ggml_tensor * out = ggml_view_3d(ctx, all, n_embd, g.n_used, n_tokens, all->nb[1], all->nb[1] * g.n_used, 0);
    out->src[1]       = end;
    g.merged          = true;
    wave_bank         = -1;
    return out;
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
    if (observes() || streams()) {
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
    for (const auto & pool : pools) {
        if (pool) {
            end_event(*pool);
        }
    }
    store_error.clear(); // of an evaluation that nobody asked about

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

// What lies in a pool, or in what waves share: it is of use on its device only.
bool hotmoe_cache_impl::owns(const ggml_tensor * weight) const {
    return own_buffers.find(weight->buffer) != own_buffers.end();
}

static bool has_prefix(const ggml_tensor * node, const char * prefix) {
    return std::strncmp(node->name, prefix, std::strlen(prefix)) == 0;
}

bool hotmoe_cache_impl::anchor_match(const ggml_tensor * node) const {
    if (node->op == GGML_OP_GET_ROWS) {
        return by_table.find(node->src[0]) != by_table.end();
    }
    return node->op == GGML_OP_CONT &&
        ((observes() && has_prefix(node, OBSERVED_NAME)) || (!wave_memories.empty() && (has_prefix(node, WAVE_IDS_NAME) || has_prefix(node, MERGED_NAME))));
}

ggml_status hotmoe_cache_impl::anchor_run(const ggml_tensor * node, const ggml_tensor * src, ggml_backend_t src_backend, ggml_backend_t backend, bool * again) {
    const int32_t bank = std::atoi(std::strrchr(node->name, '-') + 1);
    if (bank < 0 || bank >= (int32_t) plan_banks.size() || !computing || (!has_prefix(node, OBSERVED_NAME) && !pools[bank])) {
        GGML_LOG_ERROR("hotmoe: node %s belongs to no pool\n", node->name);
        return GGML_STATUS_FAILED;
    }
    try {
        event.layer = plan_banks[bank].layer;
        event.bank  = plan_banks[bank].bank;
        if (has_prefix(node, OBSERVED_NAME)) {
            return observe(bank, src, src_backend);
        }
        if (has_prefix(node, MERGED_NAME)) {
            *again = pools[bank]->more_waves();
            if (!*again) {
                pools[bank]->end_event();
            }
            return GGML_STATUS_SUCCESS;
        }
        return run_pool(bank, src, src_backend, backend);
    } catch (const std::exception & e) {
        GGML_LOG_ERROR("hotmoe: layer %d: %s\n", event.layer, e.what());
        return GGML_STATUS_FAILED;
    }
}

ggml_status hotmoe_cache_impl::run_pool(int32_t bank, const ggml_tensor * src, ggml_backend_t src_backend, ggml_backend_t backend) {
    expert_pool &    p      = *pools[bank];
    const graph_bank routed = computing->banks[bank];
    if (p.stream && computing->bypass == LLAMA_EXPERT_BYPASS_CB_EVAL) {
        p.error = "experts are streamed, which does not go with an eval callback: it would see slot ids";
        fail(p);
        return GGML_STATUS_FAILED;
    }
    const bool warmup = computing->bypass == LLAMA_EXPERT_BYPASS_WARMUP;
    if (!routed.wave.sources) {
        const ggml_status status =
            p.is_fed() ? p.run_fed(src, routed.weights, warmup, src_backend, backend, event) : p.run(src, routed.weights, src_backend, backend, event);
        if (status != GGML_STATUS_SUCCESS) {
            fail(p);
        } else if (!warmup) {
            tell(p.last_routing(), routed.n_used);
        }
        return status;
    }
    if (!routed.merged) {
        p.error = "this model's graph does not tell where its experts end, so a ubatch that needs more of them than there are slots cannot be computed: take more slots, or a smaller ubatch";
        fail(p);
        return GGML_STATUS_FAILED;
    }
    const bool        first  = !p.in_waves();
    const ggml_status status = p.run_wave(src, routed.weights, routed.wave, routed.n_used, routed.by_pair, warmup, src_backend, backend, event);
    if (status != GGML_STATUS_SUCCESS) {
        p.end_event();
        fail(p);
    } else if (first && !warmup) {
        tell(p.last_routing(), routed.n_used);
    }
    return status;
}

void hotmoe_cache_impl::fail(expert_pool & pool) {
    GGML_LOG_ERROR("hotmoe: layer %d: %s\n", pool.layer, pool.error.c_str());
    if (std::exchange(pool.store_failed, false)) {
        store_error = "layer " + std::to_string(pool.layer) + ": " + pool.error;
    }
}

// What a layer computes can fail after its anchor has run, when an expert does not arrive.
void hotmoe_cache_impl::end_event(expert_pool & pool) {
    pool.end_event();
    if (pool.store_failed) {
        fail(pool);
    }
}

std::string hotmoe_cache_impl::take_store_error() {
    for (const auto & pool : pools) {
        if (pool && pool->is_fed()) {
            end_event(*pool);
        }
    }
    return std::exchange(store_error, {});
}

bool hotmoe_cache_impl::streams() const {
    return std::any_of(pools.begin(), pools.end(), [](const auto & pool) { return pool && pool->stream; });
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
