#include "pool.h"

#include "hook_clock.h"

#include <algorithm>
#include <numeric>
#include <utility>

expert_pool::expert_pool(int32_t layer, int32_t bank, ggml_backend_dev_t dev, const std::vector<ggml_tensor *> & host)
    : layer(layer), bank(bank), dev(dev), host(host) {}

uint64_t expert_pool::expert_bytes() const {
    uint64_t bytes = 0;
    for (const ggml_tensor * t : host) {
        bytes += t->nb[2];
    }
    return bytes;
}

// Slots that readers fill lie modulo the page as their experts do in the file: then reads need no copy.
static constexpr size_t PAGE = 4096;

uint64_t expert_pool::fixed_bytes(const std::vector<ggml_tensor *> & host, ggml_backend_buffer_type_t buft, int32_t n_spare) {
    const uint64_t align = std::max(ggml_backend_buft_get_alignment(buft), PAGE);
    uint64_t       spare = 0;
    for (const ggml_tensor * t : host) {
        spare += t->nb[2] * n_spare;
    }
    return (host.size() + 1) * (POOL_TAIL_BYTES + 2 * align) + align + host[0]->ne[2] * sizeof(int32_t) + spare;
}

bool expert_pool::allocate(int32_t n_slots, int32_t n_spare, const hotmoe_policy & policy, const hotmoe_admission & admission) {
    const int32_t n_expert = (int32_t) host[0]->ne[2];
    map                    = std::make_unique<slot_map>(n_expert, n_slots, policy, admission);

    ggml_init_params params = {};
    params.mem_size         = (2 * host.size() + 1) * ggml_tensor_overhead();
    params.no_alloc         = true;
    ctx.reset(ggml_init(params));
    if (!ctx) {
        return false;
    }

    for (const ggml_tensor * t : host) {
        ggml_tensor * s = ggml_new_tensor_3d(ctx.get(), t->type, t->ne[0], t->ne[1], n_slots + n_spare);
        ggml_format_name(s, "%s (slots)", t->name);
        slots.push_back(s);
    }
    table = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, n_expert);
    ggml_format_name(table, "hotmoe_table-%d-%d", layer, bank);

    std::vector<ggml_tensor *> all = slots;
    all.push_back(table);

    ggml_backend_buffer_type_t buft  = ggml_backend_dev_buffer_type(dev);
    const size_t               align = std::max(ggml_backend_buft_get_alignment(buft), PAGE);
    size_t                     size  = 0;
    for (const ggml_tensor * t : all) {
        size += GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t) + POOL_TAIL_BYTES + align, align);
    }
    buffer.reset(ggml_backend_buft_alloc_buffer(buft, size + align));
    if (!buffer) {
        return false;
    }
    // marked as weights, so that the scheduler runs the ops that use them where they are
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(buffer.get(), 0);
    uintptr_t at = GGML_PAD((uintptr_t) ggml_backend_buffer_get_base(buffer.get()), align);
    for (size_t i = 0; i < all.size(); i++) {
        const size_t phase = stream && i < host.size() ? stream->phase_of((int32_t) i, PAGE) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT : 0;
        if (ggml_backend_tensor_alloc(buffer.get(), all[i], (void *) (at + phase)) != GGML_STATUS_SUCCESS) {
            return false;
        }
        at += GGML_PAD(ggml_backend_buft_get_alloc_size(buft, all[i]) + POOL_TAIL_BYTES + align, align);
    }

    table_host.assign(n_expert, 0);
    table_stale = table_host;

    if (is_fed()) {
        feed = std::make_unique<expert_feed>(*stream, slots);
        for (size_t i = 0; i < host.size(); i++) {
            fed.push_back(ggml_new_tensor_3d(ctx.get(), host[i]->type, host[i]->ne[0], host[i]->ne[1], n_expert));
            ggml_format_name(fed[i], "%s (fed)", host[i]->name);
            feed->stand_in((int32_t) i, fed[i]);
        }
        std::iota(table_host.begin(), table_host.end(), 0); // the ids that it takes are those of experts
        ggml_backend_tensor_set(table, table_host.data(), 0, table_host.size() * sizeof(int32_t));
    }
    return true;
}

expert_pool::~expert_pool() {
    end_event();
    if (is_fed() && stream->stuck()) {
        (void) buffer.release(); // see expert_stream::stuck
    }
}

ggml_tensor * expert_pool::stand_in(const ggml_tensor * t) const {
    for (size_t i = 0; i < host.size(); i++) {
        if (host[i] == t) {
            return is_fed() ? fed[i] : slots[i];
        }
    }
    return nullptr;
}

bool expert_pool::check_backend(ggml_backend_t backend) {
    if (ggml_backend_get_device(backend) != dev) {
        error = std::string("the split was given to ") + ggml_backend_name(backend) + ", but the pool is on " + ggml_backend_dev_name(dev);
        return false;
    }
    if (fault == HOTMOE_FAULT_STATUS) {
        error = "a failure was asked for";
        return false;
    }
    return true;
}

bool expert_pool::acquire(const int32_t * ids, const float * weights, int64_t n, const hotmoe_event & event, slot_event_result & result) {
    int32_t bad_id   = 0;
    map->unprotected = fault == HOTMOE_FAULT_PROTECTION;
    if (map->acquire(ids, weights, n, event, result, &bad_id)) {
        return true;
    }
    error = bad_id == -1 ? "the ubatch needs more experts than there are slots" :
                           "expert id " + std::to_string(bad_id) + " is not in [0, " + std::to_string(map->n_expert()) + ")";
    return false;
}

void expert_pool::count(const slot_event_result & r, const hotmoe_event & event) {
    hotmoe_counters & c = counters[event.phase];
    c.hits             += r.n_hits;
    c.misses           += r.n_misses;
    c.evictions        += r.evicted.size();
    c.not_admitted     += r.n_refused;
    c.policy_fallbacks += r.fallback;
}

ggml_status expert_pool::run(const ggml_tensor * src, const ggml_tensor * weights, ggml_backend_t src_backend, ggml_backend_t backend,
                             const hotmoe_event & event) {
    const hook_clock::time_point t_start = hook_clock::now();

    if (!check_backend(backend) || !routed.read(src, weights, src_backend, error)) {
        return GGML_STATUS_FAILED;
    }
    if (fault != HOTMOE_FAULT_NO_WAIT) {
        ggml_backend_synchronize(src_backend);
        if (src_backend != backend) {
            ggml_backend_synchronize(backend);
        }
    }
    if (tier2) {
        tier2->done();
    }

    const hook_clock::time_point t_ids = hook_clock::now();

    if (!acquire(routed.ids.data(), routed.weights_or_null(), (int64_t) routed.ids.size(), event, result) || !bring(result, backend, event)) {
        return GGML_STATUS_FAILED;
    }
    if (!result.loads.empty() || table_behind) {
        write_table(result.loads, backend);
    }

    hotmoe_counters & c = counters[event.phase];
    c.events++;
    count(result, event);
    c.wait_ns += ns_between(t_start, t_ids);
    c.hook_ns += ns_between(t_ids, hook_clock::now());
    return GGML_STATUS_SUCCESS;
}

//
// bringing experts in
//

// Router weights, summed over the event's tokens: `weight_of`.
void expert_pool::sum_weights() {
    weight_of.assign(map->n_expert(), 0.0f);
    for (size_t p = 0; p < routed.weights.size(); p++) {
        weight_of[routed.ids[p]] += routed.weights[p];
    }
}

// Queue what the slots that `r` gave away are to hold.
bool expert_pool::bring(const slot_event_result & r, ggml_backend_t backend, const hotmoe_event & event) {
    const std::vector<slot_load> & loads = r.loads;
    if (loads.empty() || fault == HOTMOE_FAULT_NO_UPLOAD) {
        return true;
    }
    hotmoe_counters & c = counters[event.phase];
    if (!stream) {
        for (const slot_load & load : loads) {
            data.clear();
            for (const ggml_tensor * t : host) {
                data.push_back((const char *) t->data + load.expert * t->nb[2]);
            }
            upload(load, data.data(), backend, c);
        }
        return true;
    }
    tier2->released(r.evicted, event);
    const bool with_weights = tier2->wants_weights() && !routed.weights.empty();
    if (with_weights) {
        sum_weights();
    }
    // At once if there is room, else half of tier 2 at a time: while what was queued from one half leaves, or a wave computes, the
    // other is filled. Before slots are filled anew, what was queued from them must have left.
    const size_t         part = tier2->has_room_for((int32_t) loads.size()) ? loads.size() : std::max(1, tier2->n_slots() / 2);
    std::vector<int32_t> experts;
    for (size_t at = 0; at < loads.size(); at += part) {
        const size_t end = std::min(loads.size(), at + part);
        experts.clear();
        host_weights.clear();
        for (size_t i = at; i < end; i++) {
            experts.push_back(loads[i].expert);
            if (with_weights) {
                host_weights.push_back(weight_of[loads[i].expert]);
            }
        }
        if (!tier2->has_room_for((int32_t) experts.size())) {
            if (fault != HOTMOE_FAULT_TIER2_REUSE) {
                ggml_backend_synchronize(backend);
            }
            tier2->done();
        }
        if (!tier2->fetch(*stream, experts.data(), with_weights ? host_weights.data() : nullptr, (int32_t) experts.size(), event, data, error)) {
            for (size_t i = at; i < loads.size(); i++) {
                map->drop(loads[i].expert);
            }
            store_failed = true;
            return false;
        }
        for (size_t i = at; i < end; i++) {
            upload(loads[i], &data[(i - at) * host.size()], backend, c);
        }
    }
    return true;
}

void expert_pool::upload(const slot_load & load, const void * const * from, ggml_backend_t backend, hotmoe_counters & c) {
    for (size_t i = 0; i < host.size(); i++) {
        const size_t size = host[i]->nb[2];
        ggml_backend_tensor_set_async(backend, slots[i], from[i], load.slot * size, size);
        c.uploads++;
        c.uploaded_bytes += size;
    }
}

void expert_pool::write_table(const std::vector<slot_load> & loads, ggml_backend_t backend) {
    if (fault == HOTMOE_FAULT_STALE_TABLE) {
        table_stale = table_host;
    }
    // entries of evicted experts keep their old slot: nothing asks for them before they are loaded again
    for (const slot_load & load : loads) {
        table_host[load.expert] = load.slot;
    }
    if (fault == HOTMOE_FAULT_SLOT_MAP && !loads.empty() && map->n_slots() > 1) {
        std::swap(table_host[map->expert_in(loads[0].slot)], table_host[std::max(0, map->expert_in((loads[0].slot + 1) % map->n_slots()))]);
    }
    table_behind                      = false;
    const std::vector<int32_t> & from = fault == HOTMOE_FAULT_STALE_TABLE ? table_stale : table_host;
    ggml_backend_tensor_set_async(backend, table, from.data(), 0, from.size() * sizeof(int32_t));
}

bool expert_pool::read_slot(int32_t t, int32_t slot, void * data, size_t size) const {
    if (t < 0 || t >= (int32_t) slots.size() || slot < 0 || slot >= map->n_slots() || size > slots[t]->nb[2]) {
        return false;
    }
    ggml_backend_tensor_get(slots[t], data, slot * slots[t]->nb[2], size);
    return true;
}

const void * expert_pool::host_expert(int32_t t, int32_t expert, size_t * size) const {
    if (t < 0 || t >= (int32_t) host.size() || expert < 0 || expert >= map->n_expert()) {
        return nullptr;
    }
    *size = host[t]->nb[2];
    return (const char *) host[t]->data + expert * host[t]->nb[2];
}
