// Random.
//
// Evicts any candidate, the yardstick for policies that claim to know better. The same seed gives the same victims: each time
// something must go, a number is drawn (SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014), every candidate gets that number scrambled with its own id, and the lowest go. So the order in which candidates
// come does not matter. Each bank has a sequence of its own. Cost per event: some multiplications per candidate if something
// must go.

#include "policies.h"
#include "policy_util.h"

struct policy_random : policy_base {
    static constexpr uint64_t gamma = 0x9e3779b97f4a7c15; // what SplitMix64 adds per draw: 2^64 over the golden ratio

    uint64_t start;
    uint64_t state;

    policy_random(uint64_t seed, uint64_t stream) : start(scramble(seed + gamma * stream)), state(start) {}

    static uint64_t scramble(uint64_t z) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        state               += gamma;
        const uint64_t drawn = scramble(state);
        return policy_pick_lowest(n, candidates, n_candidates, victims, [drawn](int32_t id) { return scramble(drawn + gamma * (uint64_t) id); });
    }

    void reset() { state = start; }
};

hotmoe_policy policy_random_create(const hotmoe_policy_config & config, policy_options & options) {
    const uint64_t seed   = (uint64_t) options.integer("seed", 0, 0, 2147483647);
    const uint64_t stream = 2 * (uint64_t) (config.layer + 1) + (uint64_t) config.bank;
    return policy_wrap(new policy_random(seed, stream));
}
