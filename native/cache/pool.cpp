#include "pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

using hook_clock = std::chrono::steady_clock;

static uint64_t ns_between(hook_clock::time_point from, hook_clock::time_point to) {
    return (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count();
}

expert_pool::expert_pool(int32_t layer, int32_t bank, ggml_backend_dev_t dev, const std::vector<ggml_tensor *> & host)
    : layer(layer), bank(bank), dev(dev), host(host) {}

uint64_t expert_pool::expert_bytes() const {
    uint64_t bytes = 0;
    for (const ggml_tensor * t : host) {
        bytes += t->nb[2];
    }
    return bytes;
}

uint64_t expert_pool::fixed_bytes(const std::vector<ggml_tensor *> & host, ggml_backend_buffer_type_t buft) {
    const uint64_t per_tensor = POOL_TAIL_BYTES + ggml_backend_buft_get_alignment(buft);
    return (host.size() + 1) * per_tensor + host[0]->ne[2] * sizeof(int32_t);
}

bool expert_pool::allocate(int32_t n_slots, const hotmoe_policy & policy, const hotmoe_admission & admission) {
    const int32_t n_expert = (int32_t) host[0]->ne[2];
    map                    = std::make_unique<slot_map>(n_expert, n_slots, policy, admission);

    ggml_init_params params = {};
    params.mem_size         = (host.size() + 1) * ggml_tensor_overhead();
    params.no_alloc         = true;
    ctx.reset(ggml_init(params));
    if (!ctx) {
        return false;
    }

    for (const ggml_tensor * t : host) {
        ggml_tensor * s = ggml_new_tensor_3d(ctx.get(), t->type, t->ne[0], t->ne[1], n_slots);
        ggml_format_name(s, "%s (slots)", t->name);
        slots.push_back(s);
    }
    table = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, n_expert);
    ggml_format_name(table, "hotmoe_table-%d-%d", layer, bank);

    std::vector<ggml_tensor *> all = slots;
    all.push_back(table);

    ggml_backend_buffer_type_t buft  = ggml_backend_dev_buffer_type(dev);
    const size_t               align = ggml_backend_buft_get_alignment(buft);
    size_t                     size  = 0;
    std::vector<size_t>        offsets;
    for (const ggml_tensor * t : all) {
        offsets.push_back(size);
        size += GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t) + POOL_TAIL_BYTES, align);
    }
    buffer.reset(ggml_backend_buft_alloc_buffer(buft, size));
    if (!buffer) {
        return false;
    }
    // marked as weights, so that the scheduler runs the ops that use them where they are
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(buffer.get(), 0);
    char * base = (char *) ggml_backend_buffer_get_base(buffer.get());
    for (size_t i = 0; i < all.size(); i++) {
        if (ggml_backend_tensor_alloc(buffer.get(), all[i], base + offsets[i]) != GGML_STATUS_SUCCESS) {
            return false;
        }
    }

    table_host.assign(n_expert, 0);
    table_stale = table_host;
    return true;
}

ggml_tensor * expert_pool::stand_in(const ggml_tensor * t) const {
    for (size_t i = 0; i < host.size(); i++) {
        if (host[i] == t) {
            return slots[i];
        }
    }
    return nullptr;
}

ggml_status expert_pool::run(const ggml_tensor * src, const ggml_tensor * weights, ggml_backend_t src_backend, ggml_backend_t backend,
                             const hotmoe_event & event) {
    const hook_clock::time_point t_start = hook_clock::now();

    if (ggml_backend_get_device(backend) != dev) {
        error = std::string("the split was given to ") + ggml_backend_name(backend) + ", but the pool is on " + ggml_backend_dev_name(dev);
        return GGML_STATUS_FAILED;
    }
    if (fault == HOTMOE_FAULT_STATUS) {
        error = "a failure was asked for";
        return GGML_STATUS_FAILED;
    }
    if (!routed.read(src, weights, src_backend, error)) {
        return GGML_STATUS_FAILED;
    }
    if (fault != HOTMOE_FAULT_NO_WAIT) {
        ggml_backend_synchronize(src_backend);
        if (src_backend != backend) {
            ggml_backend_synchronize(backend);
        }
    }

    const hook_clock::time_point t_ids = hook_clock::now();

    int32_t bad_id   = 0;
    map->unprotected = fault == HOTMOE_FAULT_PROTECTION;
    if (!map->acquire(routed.ids.data(), routed.weights_or_null(), (int64_t) routed.ids.size(), event, result, &bad_id)) {
        error = bad_id == -1 ? "the ubatch needs more experts than there are slots" :
                               "expert id " + std::to_string(bad_id) + " is not in [0, " + std::to_string(map->n_expert()) + ")";
        return GGML_STATUS_FAILED;
    }

    hotmoe_counters & c = counters[event.phase];
    for (const slot_load & load : result.loads) {
        upload(load, backend, c);
    }
    if (!result.loads.empty()) {
        write_table(result.loads, backend);
    }

    c.events++;
    c.hits             += result.n_hits;
    c.misses           += result.n_misses;
    c.evictions        += result.evicted.size();
    c.not_admitted     += result.n_refused;
    c.policy_fallbacks += result.fallback;
    c.wait_ns          += ns_between(t_start, t_ids);
    c.hook_ns          += ns_between(t_ids, hook_clock::now());
    return GGML_STATUS_SUCCESS;
}

void expert_pool::upload(const slot_load & load, ggml_backend_t backend, hotmoe_counters & c) {
    if (fault == HOTMOE_FAULT_NO_UPLOAD) {
        return;
    }
    for (size_t i = 0; i < host.size(); i++) {
        const size_t size = host[i]->nb[2];
        ggml_backend_tensor_set_async(backend, slots[i], (const char *) host[i]->data + load.expert * size, load.slot * size, size);
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
    if (fault == HOTMOE_FAULT_SLOT_MAP && map->n_slots() > 1) {
        std::swap(table_host[map->expert_in(loads[0].slot)], table_host[std::max(0, map->expert_in((loads[0].slot + 1) % map->n_slots()))]);
    }
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
