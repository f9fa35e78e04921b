#pragma once

// Reading recorded events.

#include "hotmoe/replay.h"

#include <cstdint>
#include <vector>

// The distinct experts of one event, in the order of their first use.
struct distinct_experts {
    std::vector<int32_t> experts;
    std::vector<float>   weights; // router weights, summed; empty if the events have none

    void collect(const hotmoe_replay_events & events, int64_t i) {
        experts.clear();
        weights.clear();
        mark++;
        for (int64_t k = events.offsets[i]; k < events.offsets[i + 1]; k++) {
            const int32_t id = events.experts[k];
            if (id >= (int32_t) seen_in.size()) {
                seen_in.resize(id + 1, 0);
                position.resize(id + 1, 0);
            }
            if (seen_in[id] != mark) {
                seen_in[id]  = mark;
                position[id] = experts.size();
                experts.push_back(id);
                if (events.weights) {
                    weights.push_back(events.weights[k]);
                }
            } else if (events.weights) {
                weights[position[id]] += events.weights[k];
            }
        }
    }

  private:
    std::vector<uint64_t> seen_in; // per expert: the call that saw it last
    std::vector<size_t>   position;
    uint64_t              mark = 0;
};
