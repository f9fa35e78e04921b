// The C functions of cache.h and testing.h over expert_cache.

#include "expert_cache.h"

#include "cache/error.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>

int32_t hotmoe_cache_attach(llama_context * ctx, const hotmoe_cache_params * params, hotmoe_cache ** out) {
    if (!ctx || !params || !out) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_cache_attach: ctx, params and out must be set");
    }
    try {
        auto          cache  = std::make_unique<hotmoe_cache>();
        const int32_t status = cache->impl.attach(ctx, *params);
        if (status == HOTMOE_OK) {
            *out = cache.release();
        }
        return status;
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "hotmoe_cache_attach: %s", e.what());
    }
}

void hotmoe_cache_free(hotmoe_cache * cache) {
    delete cache;
}

static int32_t no_cache() {
    return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "the cache must be set");
}

int32_t hotmoe_cache_clear(hotmoe_cache * cache) {
    if (!cache) {
        return no_cache();
    }
    cache->impl.clear();
    return HOTMOE_OK;
}

//
// plan
//

int32_t hotmoe_plan_n_banks(const hotmoe_cache * cache) {
    return cache ? (int32_t) cache->impl.plan_banks.size() : 0;
}

int32_t hotmoe_plan_n_devices(const hotmoe_cache * cache) {
    return cache ? (int32_t) cache->impl.plan_devices.size() : 0;
}

template <typename T> static int32_t get_row(const std::vector<T> & rows, const char * what, int32_t i, T * out) {
    if (!out || i < 0 || i >= (int32_t) rows.size()) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s %d is not in [0, %zu)", what, i, rows.size());
    }
    *out = rows[i];
    return HOTMOE_OK;
}

int32_t hotmoe_plan_get_bank(const hotmoe_cache * cache, int32_t i, hotmoe_plan_bank * out) {
    return cache ? get_row(cache->impl.plan_banks, "bank", i, out) : no_cache();
}

int32_t hotmoe_plan_get_device(const hotmoe_cache * cache, int32_t i, hotmoe_plan_device * out) {
    return cache ? get_row(cache->impl.plan_devices, "device", i, out) : no_cache();
}

int32_t hotmoe_plan_get_host(const hotmoe_cache * cache, hotmoe_plan_host * out) {
    if (!cache || !out) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_plan_get_host: the cache and out must be set");
    }
    *out = cache->impl.plan_host;
    return HOTMOE_OK;
}

const char * hotmoe_cache_policy(const hotmoe_cache * cache) {
    return cache ? cache->impl.policy.c_str() : "";
}

const char * hotmoe_cache_admission(const hotmoe_cache * cache) {
    return cache ? cache->impl.admission.c_str() : "";
}

const char * hotmoe_cache_host_policy(const hotmoe_cache * cache) {
    return cache && cache->impl.has_tier2() ? cache->impl.host_policy.c_str() : "";
}

const char * hotmoe_cache_host_admission(const hotmoe_cache * cache) {
    return cache && cache->impl.has_tier2() ? cache->impl.host_admission.c_str() : "";
}

//
// counters
//

const char * hotmoe_bypass_name(int32_t reason) {
    static const char * const names[HOTMOE_BYPASS_COUNT] = { "too_few_slots", "warmup", "cb_eval" };
    return reason >= 0 && reason < HOTMOE_BYPASS_COUNT ? names[reason] : nullptr;
}

static void add(hotmoe_counters & sum, const hotmoe_counters & c) {
    sum.events           += c.events;
    sum.hits             += c.hits;
    sum.misses           += c.misses;
    sum.evictions        += c.evictions;
    sum.uploads          += c.uploads;
    sum.uploaded_bytes   += c.uploaded_bytes;
    sum.not_admitted     += c.not_admitted;
    sum.policy_fallbacks += c.policy_fallbacks;
    sum.waves            += c.waves;
    sum.wait_ns          += c.wait_ns;
    sum.hook_ns          += c.hook_ns;
    for (int32_t r = 0; r < HOTMOE_BYPASS_COUNT; r++) {
        sum.bypassed[r] += c.bypassed[r];
    }
}

static bool phase_is_legal(int32_t phase) {
    return phase >= -1 && phase < HOTMOE_PHASE_COUNT;
}

int32_t hotmoe_cache_stats(const hotmoe_cache * cache, int32_t i, int32_t phase, hotmoe_counters * out) {
    const int32_t n = hotmoe_plan_n_banks(cache);
    if (!cache || !out || i < -1 || i >= n || !phase_is_legal(phase)) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_cache_stats: bank %d is not in [-1, %d), or phase %d is not in [-1, %d)", i, n, phase, HOTMOE_PHASE_COUNT);
    }
    *out = {};
    for (int32_t b = i < 0 ? 0 : i; b < (i < 0 ? n : i + 1); b++) {
        const expert_pool * pool = cache->impl.pool(b);
        for (int32_t p = 0; pool && p < HOTMOE_PHASE_COUNT; p++) {
            if (phase < 0 || p == phase) {
                add(*out, pool->counters[p]);
            }
        }
    }
    return HOTMOE_OK;
}

int32_t hotmoe_cache_step_stats(const hotmoe_cache * cache, int32_t phase, hotmoe_step_counters * out) {
    if (!cache || !out || !phase_is_legal(phase)) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_cache_step_stats: phase %d is not in [-1, %d)", phase, HOTMOE_PHASE_COUNT);
    }
    *out = {};
    for (int32_t p = 0; p < HOTMOE_PHASE_COUNT; p++) {
        if (phase >= 0 && p != phase) {
            continue;
        }
        const hotmoe_step_counters & s = cache->impl.steps[p];
        out->steps                    += s.steps;
        out->tokens                   += s.tokens;
        out->graphs_built             += s.graphs_built;
        for (int32_t r = 0; r < HOTMOE_BYPASS_COUNT; r++) {
            out->bypassed[r] += s.bypassed[r];
        }
    }
    return HOTMOE_OK;
}

void hotmoe_cache_reset_stats(hotmoe_cache * cache) {
    if (cache) {
        cache->impl.reset_stats();
    }
}

static expert_pool * pooled_bank(const hotmoe_cache * cache, int32_t i) {
    expert_pool * pool = cache ? cache->impl.pool(i) : nullptr;
    if (!pool) {
        hotmoe_fail(HOTMOE_ERR_ARGUMENT, "bank %d is not in [0, %d), or it is not pooled", i, hotmoe_plan_n_banks(cache));
    }
    return pool;
}

int32_t hotmoe_cache_slot_map(const hotmoe_cache * cache, int32_t i, int32_t * experts, int32_t n) {
    const expert_pool * pool = pooled_bank(cache, i);
    if (!pool) {
        return HOTMOE_ERR_ARGUMENT;
    }
    const int32_t n_slots = pool->map->n_slots();
    if (!experts || n < n_slots) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_cache_slot_map: room for %d experts, but bank %d has %d slots", n, i, n_slots);
    }
    for (int32_t s = 0; s < n_slots; s++) {
        experts[s] = pool->map->expert_in(s);
    }
    return n_slots;
}

//
// store
//

int32_t hotmoe_cache_store_stats(const hotmoe_cache * cache, hotmoe_store_counters * out) {
    if (!cache || !out) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_cache_store_stats: the cache and out must be set");
    }
    *out = cache->impl.store_stats();
    return HOTMOE_OK;
}

// A text that a function returns: valid until the next one on this thread.
static const char * kept(std::string text) {
    static thread_local std::string last;
    last = std::move(text);
    return last.c_str();
}

const char * hotmoe_cache_take_store_error(hotmoe_cache * cache) {
    return cache ? kept(cache->impl.take_store_error()) : "";
}

const char * hotmoe_cache_store_warning(const hotmoe_cache * cache) {
    return cache ? kept(cache->impl.store_warning()) : "";
}

//
// trace
//

static const trace_buffer * recorded(const hotmoe_cache * cache) {
    const trace_buffer * trace = cache ? cache->impl.trace.get() : nullptr;
    if (!trace) {
        hotmoe_fail(HOTMOE_ERR_STATE, "the cache records nothing: attach it with record");
    }
    return trace;
}

int32_t hotmoe_trace_size(const hotmoe_cache * cache, int64_t * n_events, int64_t * n_ids) {
    const trace_buffer * trace = recorded(cache);
    if (!trace) {
        return HOTMOE_ERR_STATE;
    }
    if (!n_events || !n_ids) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_trace_size: n_events and n_ids must be set");
    }
    *n_events = (int64_t) trace->events.size();
    *n_ids    = (int64_t) trace->ids.size();
    return HOTMOE_OK;
}

int32_t hotmoe_trace_take(hotmoe_cache * cache, hotmoe_trace_event * events, int64_t n_events, int32_t * ids, float * weights, int64_t n_ids) {
    const trace_buffer * trace = recorded(cache);
    if (!trace) {
        return HOTMOE_ERR_STATE;
    }
    if (n_events != (int64_t) trace->events.size() || n_ids != (int64_t) trace->ids.size() || (n_ids > 0 && (!events || !ids || !weights))) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_trace_take: room for %lld events and %lld ids, but there are %zu and %zu", (long long) n_events,
                           (long long) n_ids, trace->events.size(), trace->ids.size());
    }
    std::copy(trace->events.begin(), trace->events.end(), events);
    std::copy(trace->ids.begin(), trace->ids.end(), ids);
    std::copy(trace->weights.begin(), trace->weights.end(), weights);
    cache->impl.trace->clear();
    return HOTMOE_OK;
}

//
// testing
//

void hotmoe_testing_set_fault(hotmoe_cache * cache, int32_t fault) {
    if (cache) {
        cache->impl.set_fault(fault);
    }
}

int32_t hotmoe_testing_read_slot(const hotmoe_cache * cache, int32_t i, int32_t t, int32_t slot, void * data, size_t size) {
    const expert_pool * pool = pooled_bank(cache, i);
    if (!pool) {
        return HOTMOE_ERR_ARGUMENT;
    }
    cache->impl.synchronize();
    if (!pool->read_slot(t, slot, data, size)) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_testing_read_slot: tensor %d, slot %d or size %zu is out of range", t, slot, size);
    }
    return HOTMOE_OK;
}

const void * hotmoe_testing_host_expert(const hotmoe_cache * cache, int32_t i, int32_t t, int32_t expert, size_t * size) {
    const expert_pool * pool = pooled_bank(cache, i);
    return pool && size ? pool->host_expert(t, expert, size) : nullptr;
}
