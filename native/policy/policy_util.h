#pragma once

// What the built-in policies share: picking the n lowest candidates, time, and the boilerplate of the C structs.

#include "hotmoe/policy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

// Write the n candidates with the lowest rank to victims, lowest first; equal ranks go by expert id.
// rank(expert) returns anything that has operator<; it is called once for each candidate. Nothing is kept in order between
// events: n is small (the misses of one event), and every access would have to pay for it.
template <typename rank_fn>
int32_t policy_pick_lowest(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims, rank_fn rank) {
    using ranked = std::pair<decltype(rank(0)), int32_t>;
    if (n == 1) { // the usual case at decode
        ranked lowest(rank(candidates[0]), candidates[0]);
        for (int32_t i = 1; i < n_candidates; i++) {
            lowest = std::min(lowest, ranked(rank(candidates[i]), candidates[i]));
        }
        victims[0] = lowest.second;
        return 1;
    }
    static thread_local std::vector<ranked> all; // kept to avoid allocations
    all.clear();
    for (int32_t i = 0; i < n_candidates; i++) {
        all.emplace_back(rank(candidates[i]), candidates[i]);
    }
    std::partial_sort(all.begin(), all.begin() + n, all.end());
    for (int32_t i = 0; i < n; i++) {
        victims[i] = all[i].second;
    }
    return n;
}

// The time of a bank: how many ubatches it took part in. At decode that is tokens, in a pool that all layers share, too, and
// the waves of one large event are one point in time. What took the stock path does not count.
struct policy_clock {
    uint64_t now  = 0;
    uint64_t step = 0;

    void tick(const hotmoe_event & event) {
        if (now == 0 || event.step != step) {
            step = event.step;
            now++;
        }
    }
};

// What is left of a weight of one after `age`, when it halves every half_life. By pow, which is what ** is in Python, and out
// of the compiler's sight, which would make it exp2: the twins in Python come to the same bits.
inline double policy_decay(uint64_t age, double half_life) {
    static const volatile double two = 2.0;
    return std::pow(two, -double(age) / half_life);
}

// What every built-in policy derives from: functions that do nothing, for those that it does not need.
struct policy_base {
    void on_access(const hotmoe_event &) {}
    void on_evict(int32_t, const int32_t *) {}
    void on_load(int32_t, const int32_t *) {}
};

// A policy written as a struct T, on top of policy_base, with
//     void    on_access(const hotmoe_event & event);
//     int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims);
//     void    on_evict(int32_t n, const int32_t * experts);
//     void    on_load(int32_t n, const int32_t * experts);
//     void    reset();
template <typename T> hotmoe_policy policy_wrap(T * state) {
    hotmoe_policy out = {};
    out.struct_size   = sizeof(out);
    out.abi_version   = HOTMOE_POLICY_ABI_VERSION;
    out.context       = state;
    out.on_access     = [](void * context, const hotmoe_event * event) { ((T *) context)->on_access(*event); };
    out.select_evict  = [](void * context, const hotmoe_event *, int32_t n, const int32_t * candidates, int32_t n_candidates,
                           int32_t * victims) { return ((T *) context)->select_evict(n, candidates, n_candidates, victims); };
    out.on_evict      = [](void * context, const hotmoe_event *, int32_t n, const int32_t * experts) { ((T *) context)->on_evict(n, experts); };
    out.on_load       = [](void * context, const hotmoe_event *, int32_t n, const int32_t * experts, const int32_t *) {
        ((T *) context)->on_load(n, experts);
    };
    out.reset = [](void * context) { ((T *) context)->reset(); };
    out.free  = [](void * context) { delete (T *) context; };
    return out;
}

// The same for an admission: policy_base and
//     void on_access(const hotmoe_event & event);
//     bool admit(int32_t expert);
//     void on_evict(int32_t n, const int32_t * experts);
//     void reset();
template <typename T> hotmoe_admission admission_wrap(T * state) {
    hotmoe_admission out = {};
    out.struct_size      = sizeof(out);
    out.abi_version      = HOTMOE_POLICY_ABI_VERSION;
    out.context          = state;
    out.on_access        = [](void * context, const hotmoe_event * event) { ((T *) context)->on_access(*event); };
    out.admit            = [](void * context, const hotmoe_event *, int32_t n, const int32_t * experts, uint8_t * admitted) {
        for (int32_t i = 0; i < n; i++) {
            admitted[i] = ((T *) context)->admit(experts[i]);
        }
        return n;
    };
    out.on_evict = [](void * context, const hotmoe_event *, int32_t n, const int32_t * experts) { ((T *) context)->on_evict(n, experts); };
    out.reset    = [](void * context) { ((T *) context)->reset(); };
    out.free     = [](void * context) { delete (T *) context; };
    return out;
}
