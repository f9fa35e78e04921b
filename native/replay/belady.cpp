// Belady's optimum over events (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
// Systems Journal 1966), for caches that must, or need not, keep what they miss.
//
// When an event ends, its experts and those that were resident compete for the slots; what is used again soonest stays.
// Where every miss takes a slot, the event's own experts stay in any case. Within one event all experts are needed at once, so
// nothing is gained by looking closer than at whole events.
//
// Where the hits of one phase alone count, an expert whose next use is in the other phase is worth nothing until then: that
// use is served, and may give it a slot, whether it was resident or not.

#include "replay/events.h"

#include "hotmoe/replay.h"

#include "cache/error.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <vector>

static constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();

namespace {

struct pool_state {
    std::vector<int32_t> resident;
    std::vector<uint8_t> is_resident; // per expert
    std::vector<int64_t> next_use;    // per expert: the event after the present one that uses it, NEVER if that does not count
    std::vector<int64_t> loaded_in;   // per expert: the event whose load no hit has come of yet, -1: none
};

} // namespace

// Keep the `room` experts of `from` that are used again soonest; ties go by expert id. The others lose their slots.
static void keep_soonest(pool_state & pool, std::vector<int32_t> & from, int32_t room) {
    if ((int32_t) from.size() <= room) {
        return;
    }
    std::nth_element(from.begin(), from.begin() + room, from.end(), [&](int32_t a, int32_t b) {
        return pool.next_use[a] < pool.next_use[b] || (pool.next_use[a] == pool.next_use[b] && a < b);
    });
    for (size_t i = room; i < from.size(); i++) {
        pool.is_resident[from[i]] = 0;
    }
    from.resize(room);
}

int32_t hotmoe_replay_belady(const hotmoe_replay_events * events, int32_t n_pools, const int32_t * n_slots, int32_t miss, int32_t phase,
                             const hotmoe_replay_results * results) {
    if (!events || !n_slots || !results || n_pools < 1 || miss < HOTMOE_MISS_COPY || miss > HOTMOE_MISS_CPU || phase < -1 || phase >= HOTMOE_PHASE_COUNT) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "hotmoe_replay_belady: events, n_slots and results must be set, n_pools at least 1 (%d), miss (%d) and phase (%d) legal", n_pools,
                           miss, phase);
    }
    try {
        std::vector<int32_t> n_expert(n_pools, 0);
        for (int64_t i = 0; i < events->n; i++) {
            const int32_t p = events->pool[i];
            if (p < 0 || p >= n_pools || n_slots[p] < 1) {
                return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "event %lld: pool %d is not in [0, %d), or it has no slots", (long long) i, p, n_pools);
            }
            for (int64_t k = events->offsets[i]; k < events->offsets[i + 1]; k++) {
                if (events->experts[k] < 0) {
                    return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "event %lld: expert %d is negative", (long long) i, events->experts[k]);
                }
                n_expert[p] = std::max(n_expert[p], events->experts[k] + 1);
            }
        }

        // next_use of every access, from the end backwards
        std::vector<pool_state> pools(n_pools);
        for (int32_t p = 0; p < n_pools; p++) {
            pools[p].is_resident.assign(n_expert[p], 0);
            pools[p].next_use.assign(n_expert[p], NEVER);
            pools[p].loaded_in.assign(n_expert[p], -1);
        }
        std::vector<int64_t> next_use(events->offsets[events->n]);
        for (int64_t i = events->n - 1; i >= 0; i--) {
            const int64_t          worth = phase < 0 || events->phase[i] == phase ? i : NEVER;
            std::vector<int64_t> & next  = pools[events->pool[i]].next_use;
            for (int64_t k = events->offsets[i]; k < events->offsets[i + 1]; k++) {
                next_use[k] = next[events->experts[k]];
            }
            for (int64_t k = events->offsets[i]; k < events->offsets[i + 1]; k++) {
                next[events->experts[k]] = worth;
            }
        }

        distinct_experts     distinct;
        std::vector<int32_t> wave;
        std::vector<int32_t> others;
        std::vector<int32_t> loads(events->n, 0);
        for (int64_t i = 0; i < events->n; i++) {
            pool_state &  pool = pools[events->pool[i]];
            const int32_t room = n_slots[events->pool[i]];

            distinct.collect(*events, i);
            int32_t n_hits = 0;
            for (const int32_t id : distinct.experts) {
                n_hits += pool.is_resident[id];
                if (miss == HOTMOE_MISS_CPU) {
                    if (pool.is_resident[id] && pool.loaded_in[id] >= 0) {
                        loads[pool.loaded_in[id]]++;
                    }
                    pool.loaded_in[id] = pool.is_resident[id] ? -1 : i;
                }
            }
            if (results->accesses) {
                results->accesses[i] = (int32_t) distinct.experts.size();
            }
            if (results->hits) {
                results->hits[i] = n_hits;
            }
            for (int64_t k = events->offsets[i]; k < events->offsets[i + 1]; k++) {
                pool.next_use[events->experts[k]] = next_use[k];
            }

            const size_t n     = distinct.experts.size();
            const size_t width = miss == HOTMOE_MISS_CPU ? n : room;
            for (size_t at = 0; at < n; at += width) {
                wave.assign(distinct.experts.begin() + at, distinct.experts.begin() + std::min(n, at + width));
                for (const int32_t id : wave) {
                    if (!pool.is_resident[id]) {
                        pool.is_resident[id] = 1;
                        pool.resident.push_back(id);
                        loads[i] += miss == HOTMOE_MISS_COPY;
                    }
                }
                if (miss == HOTMOE_MISS_CPU) {
                    keep_soonest(pool, pool.resident, room);
                    continue;
                }
                std::sort(wave.begin(), wave.end());
                others.clear();
                for (const int32_t id : pool.resident) {
                    if (!std::binary_search(wave.begin(), wave.end(), id)) {
                        others.push_back(id);
                    }
                }
                keep_soonest(pool, others, room - (int32_t) wave.size());
                pool.resident = wave;
                pool.resident.insert(pool.resident.end(), others.begin(), others.end());
            }
        }
        if (results->loads) {
            std::copy(loads.begin(), loads.end(), results->loads);
        }
        return HOTMOE_OK;
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "hotmoe_replay_belady: %s", e.what());
    }
}
