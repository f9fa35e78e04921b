#include "waves.h"

#include <algorithm>

void wave_plan::make(const int32_t * ids, int64_t n, const std::vector<uint8_t> & resident, int32_t width) {
    number.assign(resident.size(), -1);
    order.clear();
    for (int64_t i = n - 1; i >= 0; i--) { // from the last use backwards
        if (number[ids[i]] < 0) {
            number[ids[i]] = 0;
            order.push_back(ids[i]);
        }
    }
    std::reverse(order.begin(), order.end());
    std::stable_partition(order.begin(), order.end(), [&](int32_t id) { return resident[id] != 0; });

    n_waves = 0;
    for (size_t at = 0; at < order.size(); n_waves++) {
        if (n_waves == (int32_t) waves.size()) {
            waves.emplace_back();
        }
        const size_t end = std::min(order.size(), at + width);
        waves[n_waves].assign(order.begin() + at, order.begin() + end);
        for (; at < end; at++) {
            number[order[at]] = n_waves;
        }
    }
}

void wave_plan::make_empty() {
    std::fill(number.begin(), number.end(), -1);
    n_waves = 1;
    if (waves.empty()) {
        waves.emplace_back();
    }
    waves[0].clear();
}
