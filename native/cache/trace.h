#pragma once

// Recorded routing that waits to be taken.

#include "routing.h"

#include "hotmoe/cache.h"

#include <cmath>
#include <vector>

struct trace_buffer {
    std::vector<hotmoe_trace_event> events;
    std::vector<int32_t>            ids;
    std::vector<float>              weights; // NaN where there are none

    // n_used: experts per token
    void add(const hotmoe_event & event, const routing & r, int32_t n_used) {
        hotmoe_trace_event row = {};
        row.step               = event.step;
        row.layer              = event.layer;
        row.bank               = event.bank;
        row.phase              = event.phase;
        row.n_tokens           = (int32_t) r.ids.size() / n_used; // the last layer may see the tokens with outputs alone
        row.n_used             = n_used;
        row.has_weights        = !r.weights.empty();
        events.push_back(row);
        ids.insert(ids.end(), r.ids.begin(), r.ids.end());
        weights.insert(weights.end(), r.weights.begin(), r.weights.end());
        weights.resize(ids.size(), NAN);
    }

    void clear() { *this = {}; }
};
