#pragma once

// Time that the cache takes inside an evaluation.

#include <chrono>
#include <cstdint>

using hook_clock = std::chrono::steady_clock;

inline uint64_t ns_between(hook_clock::time_point from, hook_clock::time_point to) {
    return (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count();
}
