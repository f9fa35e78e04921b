#pragma once

// The order in which one event's experts are computed when they do not fit in the slots all at once.

#include <cstddef>
#include <cstdint>
#include <vector>

class wave_plan {
  public:
    // Plan an event. ids[n] are the experts of all pairs, token after token; resident[e] != 0 for those that have a slot. No
    // wave has more than `width` experts or, unless it has one expert, more than `room` pairs. Those that are resident come first, so that they are used before they must go;
    // then the others, by their last use, so that the last tokens' experts are there when the event is over.
    void make(const int32_t * ids, int64_t n, const std::vector<uint8_t> & resident, int32_t width, int64_t room);

    // An event of which nothing is computed.
    void make_empty(int32_t n_expert);

    int32_t size() const { return n_waves; }

    const std::vector<int32_t> & experts(int32_t wave) const { return waves[wave]; }

    // -1: not of this event
    int32_t wave_of(int32_t expert) const { return number[expert]; }

  private:
    void collect(const int32_t * ids, int64_t n, const std::vector<uint8_t> & resident);
    void add(size_t begin, size_t end);

    std::vector<std::vector<int32_t>> waves; // kept to avoid allocations; n_waves of them count
    int32_t                           n_waves = 0;
    std::vector<int32_t>              number; // per expert
    std::vector<int32_t>              order;
    std::vector<int32_t>              n_pairs; // per expert
};
