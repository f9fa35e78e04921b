// Replay: recorded events through the engine's slot maps.

#include "cache/error.h"
#include "cache/slot_map.h"
#include "replay/events.h"

#include "hotmoe/replay.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <vector>

struct hotmoe_replay {
    std::vector<std::unique_ptr<slot_map>> pools;
    std::vector<int32_t>                   layers;
    std::vector<int32_t>                   banks;
    bool                                   refuse_means_no_slot = false;

    // scratch
    distinct_experts     distinct;
    slot_event_result    result;
    std::vector<int32_t> evicted;
};

int32_t hotmoe_replay_create(const hotmoe_replay_params * params, hotmoe_replay ** out) {
    if (!params || !out || params->n_pools < 1 || !params->layer || !params->n_expert || !params->n_slots ||
        params->miss < HOTMOE_MISS_COPY || params->miss > HOTMOE_MISS_CPU) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_replay_create: params, their arrays and out must be set, n_pools at least 1, miss legal");
    }
    try {
        auto replay                  = std::make_unique<hotmoe_replay>();
        replay->refuse_means_no_slot = params->miss == HOTMOE_MISS_CPU;
        for (int32_t p = 0; p < params->n_pools; p++) {
            hotmoe_policy_config config = {};
            config.layer                = params->layer[p];
            config.bank                 = params->bank ? params->bank[p] : 0;
            config.n_expert             = params->n_expert[p];
            config.n_slots              = params->n_slots[p];
            if (config.n_slots > config.n_expert) {
                return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "pool %d: %d slots for %d experts: no more slots than experts are of use", p, config.n_slots, config.n_expert);
            }
            hotmoe_policy    policy    = {};
            hotmoe_admission admission = {};
            int32_t          status    = hotmoe_policy_create(params->policy, &config, &policy);
            if (status == HOTMOE_OK) {
                status = hotmoe_admission_create(params->admission, &config, &admission);
                if (status != HOTMOE_OK && policy.free) {
                    policy.free(policy.context);
                }
            }
            if (status != HOTMOE_OK) {
                return status;
            }
            replay->pools.push_back(std::make_unique<slot_map>(config.n_expert, config.n_slots, policy, admission, replay->refuse_means_no_slot));
            replay->layers.push_back(config.layer);
            replay->banks.push_back(config.bank);
        }
        *out = replay.release();
        return HOTMOE_OK;
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "hotmoe_replay_create: %s", e.what());
    }
}

void hotmoe_replay_free(hotmoe_replay * replay) {
    delete replay;
}

static int32_t feed_event(hotmoe_replay & r, const hotmoe_replay_events & events, int64_t i, const hotmoe_replay_results & to) {
    const int32_t p = events.pool[i];
    if (p < 0 || p >= (int32_t) r.pools.size() || events.phase[i] < 0 || events.phase[i] >= HOTMOE_PHASE_COUNT) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "event %lld: pool %d is not in [0, %zu), or phase %d is not in [0, %d)", (long long) i, p, r.pools.size(),
                           events.phase[i], HOTMOE_PHASE_COUNT);
    }
    slot_map & map = *r.pools[p];

    hotmoe_event event = {};
    event.layer        = r.layers[p];
    event.bank         = r.banks[p];
    event.phase        = events.phase[i];
    event.n_tokens     = events.n_tokens[i];
    event.step         = events.step[i];

    const int32_t * ids     = events.experts + events.offsets[i];
    int64_t         n       = events.offsets[i + 1] - events.offsets[i];
    const float *   weights = events.weights && n > 0 && !std::isnan(events.weights[events.offsets[i]]) ? events.weights + events.offsets[i] : nullptr;
    for (int64_t k = 0; k < n; k++) {
        if (ids[k] < 0 || ids[k] >= map.n_expert()) {
            return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "event %lld: expert %d is not in [0, %d)", (long long) i, ids[k], map.n_expert());
        }
    }

    // larger than the pool: in waves
    int64_t width = n;
    int32_t n_hit = -1;
    if (n > map.n_slots() && !r.refuse_means_no_slot) {
        r.distinct.collect(events, i);
        ids     = r.distinct.experts.data();
        weights = weights ? r.distinct.weights.data() : nullptr;
        n       = (int64_t) r.distinct.experts.size();
        width   = map.n_slots();
        n_hit   = 0;
        for (int64_t k = 0; k < n; k++) {
            n_hit += map.slot_of(ids[k]) >= 0;
        }
    }

    int32_t n_experts = 0, n_hits = 0, n_loads = 0, fallbacks = 0;
    r.evicted.clear();
    for (int64_t at = 0; at < n; at += width) {
        int32_t bad_id = 0;
        if (!map.acquire(ids + at, weights ? weights + at : nullptr, std::min(width, n - at), event, r.result, &bad_id)) {
            return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "event %lld: its experts do not fit in the %d slots of pool %d beside those that are pinned", (long long) i,
                               map.n_slots(), p);
        }
        n_experts += r.result.n_experts;
        n_hits    += r.result.n_hits;
        n_loads   += (int32_t) r.result.loads.size();
        fallbacks |= r.result.fallback;
        r.evicted.insert(r.evicted.end(), r.result.evicted.begin(), r.result.evicted.end());
    }

    const auto put = [i](int32_t * array, int32_t value) {
        if (array) {
            array[i] = value;
        }
    };
    put(to.accesses, n_experts);
    put(to.hits, n_hit >= 0 ? n_hit : n_hits);
    put(to.loads, n_loads);
    put(to.evictions, (int32_t) r.evicted.size());
    put(to.fallbacks, fallbacks);
    return HOTMOE_OK;
}

int32_t hotmoe_replay_feed(hotmoe_replay * replay, const hotmoe_replay_events * events, const hotmoe_replay_results * results) {
    if (!replay || !events || !results) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_replay_feed: replay, events and results must be set");
    }
    try {
        int64_t n_evicted = 0;
        for (int64_t i = 0; i < events->n; i++) {
            const int32_t status = feed_event(*replay, *events, i, *results);
            if (status != HOTMOE_OK) {
                return status;
            }
            if (results->evicted) {
                std::copy(replay->evicted.begin(), replay->evicted.end(), results->evicted + n_evicted);
                n_evicted += (int64_t) replay->evicted.size();
            }
        }
        return HOTMOE_OK;
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "hotmoe_replay_feed: %s", e.what());
    }
}

//
// one pool
//

static slot_map * pool_of(const hotmoe_replay * replay, int32_t pool, int32_t expert) {
    if (!replay || pool < 0 || pool >= (int32_t) replay->pools.size() || expert < 0 || expert >= replay->pools[pool]->n_expert()) {
        hotmoe_fail(HOTMOE_ERR_ARGUMENT, "pool %d or expert %d is out of range", pool, expert);
        return nullptr;
    }
    return replay->pools[pool].get();
}

int32_t hotmoe_replay_slot_map(const hotmoe_replay * replay, int32_t pool, int32_t * experts, int32_t n) {
    const slot_map * map = pool_of(replay, pool, 0);
    if (!map) {
        return HOTMOE_ERR_ARGUMENT;
    }
    if (!experts || n < map->n_slots()) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_replay_slot_map: room for %d experts, but pool %d has %d slots", n, pool, map->n_slots());
    }
    for (int32_t s = 0; s < map->n_slots(); s++) {
        experts[s] = map->expert_in(s);
    }
    return map->n_slots();
}

int32_t hotmoe_replay_reset(hotmoe_replay * replay) {
    if (!replay) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "the replay must be set");
    }
    for (const auto & map : replay->pools) {
        map->clear();
    }
    return HOTMOE_OK;
}

int32_t hotmoe_replay_drop(hotmoe_replay * replay, int32_t pool, int32_t expert) {
    slot_map * map = pool_of(replay, pool, expert);
    return map ? (int32_t) map->drop(expert) : (int32_t) HOTMOE_ERR_ARGUMENT;
}

int32_t hotmoe_replay_pin(hotmoe_replay * replay, int32_t pool, int32_t expert) {
    slot_map * map = pool_of(replay, pool, expert);
    return map ? (int32_t) map->pin(expert) : (int32_t) HOTMOE_ERR_ARGUMENT;
}

int32_t hotmoe_replay_unpin(hotmoe_replay * replay, int32_t pool, int32_t expert) {
    slot_map * map = pool_of(replay, pool, expert);
    return map ? (int32_t) map->unpin(expert) : (int32_t) HOTMOE_ERR_ARGUMENT;
}

int32_t hotmoe_replay_prefetch(hotmoe_replay * replay, int32_t pool, int32_t expert) {
    slot_map * map = pool_of(replay, pool, expert);
    if (!map) {
        return HOTMOE_ERR_ARGUMENT;
    }
    map->prefetch(expert);
    return map->slot_of(expert) >= 0;
}
