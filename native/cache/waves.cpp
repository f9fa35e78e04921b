#include "waves.h"

#include <algorithm>

// The event's experts in order: those that are resident first, each group by the last use.
void wave_plan::collect(const int32_t * ids, int64_t n, const std::vector<uint8_t> & resident) {
    number.assign(resident.size(), -1);
    n_pairs.assign(resident.size(), 0);
    order.clear();
    for (int64_t i = n - 1; i >= 0; i--) { // from the last use backwards
        n_pairs[ids[i]]++;
        if (number[ids[i]] < 0) {
            number[ids[i]] = 0;
            order.push_back(ids[i]);
        }
    }
    std::reverse(order.begin(), order.end());
    std::stable_partition(order.begin(), order.end(), [&](int32_t id) { return resident[id] != 0; });
    n_waves = 0;
}

void wave_plan::add(size_t begin, size_t end) {
    if (n_waves == (int32_t) waves.size()) {
        waves.emplace_back();
    }
    waves[n_waves].assign(order.begin() + begin, order.begin() + end);
    for (size_t i = begin; i < end; i++) {
        number[order[i]] = n_waves;
    }
    n_waves++;
}

void wave_plan::make(const int32_t * ids, int64_t n, const std::vector<uint8_t> & resident, int32_t width, int64_t room) {
    collect(ids, n, resident);
    for (size_t at = 0; at < order.size();) {
        size_t  end   = at;
        int64_t pairs = 0;
        while (end < order.size() && end < at + width && (end == at || pairs + n_pairs[order[end]] <= room)) {
            pairs += n_pairs[order[end++]];
        }
        add(at, end);
        at = end;
    }
}

void wave_plan::make_empty(int32_t n_expert) {
    number.assign(n_expert, -1);
    n_waves = 1;
    if (waves.empty()) {
        waves.emplace_back();
    }
    waves[0].clear();
}
