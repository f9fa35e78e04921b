// The slot map and the built-in policies under it: the rules of an event, and what the core makes of policies that lie.
//
// Prints a line per failed check and a closing 'N passed, N failed'.

#include "cache/slot_map.h"

#include <algorithm>
#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <vector>

static int n_passed = 0;
static int n_failed = 0;

static void check(bool ok, const char * what, int line) {
    if (ok) {
        n_passed++;
    } else {
        n_failed++;
        std::printf("line %d: FAILED: %s\n", line, what);
    }
}

#define CHECK(condition) check((condition), #condition, __LINE__)

// A policy that writes down every call, and whose answer the test sets.
struct spy {
    std::string          calls; // one letter each: a(ccess), s(elect), e(vict), l(oad), r(eset), f(ree)
    hotmoe_event         event = {};
    std::vector<int32_t> experts, candidates, evicted, loaded, slots;
    std::vector<uint8_t> hit;
    std::vector<int32_t> answer;     // what select_evict writes
    int32_t              result = -1; // what it returns; -1: n

    hotmoe_policy policy() {
        hotmoe_policy p = {};
        p.struct_size   = sizeof(p);
        p.abi_version   = HOTMOE_POLICY_ABI_VERSION;
        p.context       = this;
        p.on_access     = [](void * c, const hotmoe_event * e) {
            spy & s  = *(spy *) c;
            s.calls += 'a';
            s.event  = *e;
            s.experts.assign(e->experts, e->experts + e->n_experts);
            s.hit.assign(e->hit, e->hit + e->n_experts);
        };
        p.select_evict = [](void * c, const hotmoe_event *, int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
            spy & s  = *(spy *) c;
            s.calls += 's';
            s.candidates.assign(candidates, candidates + n_candidates);
            for (int32_t i = 0; i < n && i < (int32_t) s.answer.size(); i++) {
                victims[i] = s.answer[i];
            }
            return s.result == -1 ? n : s.result;
        };
        p.on_evict = [](void * c, const hotmoe_event *, int32_t n, const int32_t * experts) {
            ((spy *) c)->calls += 'e';
            ((spy *) c)->evicted.assign(experts, experts + n);
        };
        p.on_load = [](void * c, const hotmoe_event *, int32_t n, const int32_t * experts, const int32_t * slots) {
            ((spy *) c)->calls += 'l';
            ((spy *) c)->loaded.assign(experts, experts + n);
            ((spy *) c)->slots.assign(slots, slots + n);
        };
        p.reset = [](void * c) { ((spy *) c)->calls += 'r'; };
        p.free  = [](void * c) { ((spy *) c)->calls += 'f'; };
        return p;
    }
};

static std::vector<int32_t> resident(const slot_map & map) {
    std::vector<int32_t> found;
    for (int32_t s = 0; s < map.n_slots(); s++) {
        found.push_back(map.expert_in(s));
    }
    return found;
}

static std::vector<int32_t> sorted(std::vector<int32_t> v) {
    std::sort(v.begin(), v.end());
    return v;
}

static bool run(slot_map & map, const std::vector<int32_t> & ids, slot_event_result & result, int32_t * bad = nullptr, hotmoe_event event = {}) {
    int32_t ignored = 0;
    return map.acquire(ids.data(), nullptr, (int64_t) ids.size(), event, result, bad ? bad : &ignored);
}

using ints = std::vector<int32_t>;

static void test_event() {
    spy s;
    {
        slot_map          map(8, 4, s.policy());
        slot_event_result r;
        hotmoe_event      event = {};
        event.layer             = 3;
        event.phase             = HOTMOE_PHASE_PREFILL;
        event.n_tokens          = 2;
        event.step              = 77;

        s.calls.clear();
        CHECK(run(map, { 5, 2, 5, 7 }, r, nullptr, event));
        CHECK(s.calls == "al");
        CHECK(s.event.layer == 3 && s.event.phase == HOTMOE_PHASE_PREFILL && s.event.n_tokens == 2 && s.event.step == 77);
        CHECK(s.experts == ints({ 5, 2, 7 })); // distinct, in the order of their first use
        CHECK(s.hit == std::vector<uint8_t>({ 0, 0, 0 }));
        CHECK(r.n_hits == 0 && r.n_misses == 3 && (int32_t) r.evicted.size() == 0 && r.loads.size() == 3 && !r.fallback);
        CHECK(s.loaded == ints({ 5, 2, 7 }));
        for (size_t i = 0; i < r.loads.size(); i++) {
            CHECK(r.loads[i].expert == s.loaded[i] && r.loads[i].slot == s.slots[i]);
            CHECK(map.expert_in(r.loads[i].slot) == r.loads[i].expert);
        }

        // hits are judged before anything moves; nothing is evicted while a slot is free
        s.calls.clear();
        CHECK(run(map, { 7, 1, 2 }, r));
        CHECK(s.calls == "al");
        CHECK(s.hit == std::vector<uint8_t>({ 1, 0, 1 }));
        CHECK(r.n_hits == 2 && r.n_misses == 1);

        // all hits: one call, nothing to load
        s.calls.clear();
        CHECK(run(map, { 1, 2, 5, 7 }, r));
        CHECK(s.calls == "a" && r.loads.empty() && r.n_hits == 4 && r.n_misses == 0);

        // the event's own experts are never candidates
        s.calls.clear();
        s.answer = { 5 };
        CHECK(run(map, { 1, 3, 7 }, r));
        CHECK(s.calls == "asel");
        CHECK(sorted(s.candidates) == ints({ 2, 5 }));
        CHECK(s.evicted == ints({ 5 }) && s.loaded == ints({ 3 }) && (int32_t) r.evicted.size() == 1 && !r.fallback);
        CHECK(sorted(resident(map)) == ints({ 1, 2, 3, 7 }));

        s.calls.clear();
        map.clear();
        CHECK(s.calls == "r");
        CHECK(resident(map) == ints({ -1, -1, -1, -1 }));
        CHECK(run(map, { 6 }, r) && r.n_misses == 1);
        s.calls.clear();
    }
    CHECK(s.calls == "f");
}

// Whatever a policy answers, the event goes on under LRU, and the answer is reported as refused.
static void test_lying_policies() {
    struct lie {
        const char * what;
        ints         answer;
        int32_t      result;
    };

    const lie lies[] = {
        { "too few", { 0 }, 1 },
        { "too many", { 0, 1 }, 3 },
        { "an error", { 0, 1 }, -5 },
        { "below range", { -1, 1 }, -1 },
        { "above range", { 0, 16 }, -1 },
        { "far above range", { 0, 1 << 30 }, -1 },
        { "twice the same", { 1, 1 }, -1 },
        { "not resident", { 0, 9 }, -1 },
        { "one of the event's", { 0, 3 }, -1 },
        { "one that is missing", { 10, 0 }, -1 },
        { "nothing written", {}, -1 },
    };
    for (const lie & l : lies) {
        spy               s;
        slot_map          map(16, 4, s.policy());
        slot_event_result r;
        CHECK(run(map, { 1, 0 }, r)); // 1 is the least recently used, then 0
        CHECK(run(map, { 2, 3 }, r));
        s.answer      = l.answer;
        s.result      = l.result;
        const bool ok = run(map, { 3, 10, 11 }, r);
        check(ok && r.fallback, l.what, __LINE__);
        check(s.evicted == ints({ 1, 0 }), l.what, __LINE__);
        check(sorted(resident(map)) == ints({ 2, 3, 10, 11 }), l.what, __LINE__);

        // and the next event may succeed again
        s.answer = { 10, 2 };
        s.result = -1;
        check(run(map, { 3, 12, 13 }, r) && !r.fallback, l.what, __LINE__);
        check(sorted(resident(map)) == ints({ 3, 11, 12, 13 }), l.what, __LINE__);
    }
}

// A refused event changes nothing and calls nobody.
static void test_refused_events() {
    spy               s;
    slot_map          map(8, 3, s.policy());
    slot_event_result r;
    CHECK(run(map, { 4, 5 }, r));
    const ints before = resident(map);
    s.calls.clear();
    for (const int32_t id : { -1, 8, 1 << 30, INT32_MIN }) {
        int32_t bad = 0;
        CHECK(!run(map, { 4, id }, r, &bad));
        CHECK(bad == id);
    }
    int32_t bad = 0;
    CHECK(!run(map, { 0, 1, 2, 3 }, r, &bad));
    CHECK(bad == -1);
    CHECK(s.calls.empty());
    CHECK(resident(map) == before);
    CHECK(run(map, { 0, 1, 2, 1, 0 }, r) == true); // five ids, three experts
}

// Random events under every built-in policy: the map stays injective, sums agree, protected experts stay.
static void test_built_in_policies() {
    for (int32_t p = 0; p < hotmoe_policy_count(); p++) {
        const char * name = hotmoe_policy_name(p);
        std::mt19937 rng(p + 1);
        bool         ok = true;
        for (int round = 0; round < 40; round++) {
            const int32_t        n_expert = 2 + (int32_t) (rng() % 40);
            const int32_t        n_slots  = 1 + (int32_t) (rng() % n_expert);
            hotmoe_policy        policy   = {};
            hotmoe_policy_config config   = {};
            config.n_expert               = n_expert;
            config.n_slots                = n_slots;
            ok                            = ok && hotmoe_policy_create(name, &config, &policy) == HOTMOE_OK;
            slot_map          map(n_expert, n_slots, policy);
            slot_event_result r;
            for (int e = 0; e < 300; e++) {
                std::set<int32_t> before;
                for (const int32_t id : resident(map)) {
                    before.insert(id);
                }
                ints ids;
                for (uint32_t k = 1 + rng() % n_slots; k > 0; k--) {
                    ids.push_back((int32_t) (rng() % n_expert));
                }
                const std::set<int32_t> distinct(ids.begin(), ids.end());
                int32_t                 n_hits = 0;
                for (const int32_t id : distinct) {
                    n_hits += before.count(id) > 0;
                }
                ok = ok && run(map, ids, r) && !r.fallback;
                ok = ok && r.n_hits == n_hits && r.n_misses == (int32_t) distinct.size() - n_hits && r.loads.size() == (size_t) r.n_misses;
                std::set<int32_t> after;
                int32_t           occupied = 0;
                for (const int32_t id : resident(map)) {
                    occupied += id >= 0;
                    after.insert(id);
                }
                after.erase(-1);
                ok = ok && (int32_t) after.size() == occupied; // no expert has two slots
                for (const int32_t id : distinct) {
                    ok = ok && after.count(id) == 1;
                }
                before.erase(-1);
                ok = ok && (int32_t) before.size() + r.n_misses - (int32_t) r.evicted.size() == occupied;
                if (rng() % 97 == 0) {
                    map.clear();
                }
            }
        }
        check(ok, name, __LINE__);
    }
}

// An admission that writes down what it was asked and told.
struct judge {
    ints               refused; // experts that it does not admit
    ints               asked, lost;
    int32_t            n_resets = 0;
    int32_t            result   = -1; // what admit returns; -1: n
    std::vector<float> weights;

    hotmoe_admission admission() {
        hotmoe_admission a = {};
        a.struct_size      = sizeof(a);
        a.abi_version      = HOTMOE_POLICY_ABI_VERSION;
        a.context          = this;
        a.admit            = [](void * c, const hotmoe_event * e, int32_t n, const int32_t * experts, uint8_t * admitted) {
            judge & j = *(judge *) c;
            j.asked.assign(experts, experts + n);
            j.weights.clear();
            if (e->weights) {
                j.weights.assign(e->weights, e->weights + e->n_experts);
            }
            for (int32_t i = 0; i < n; i++) {
                admitted[i] = std::count(j.refused.begin(), j.refused.end(), experts[i]) == 0;
            }
            return j.result == -1 ? n : j.result;
        };
        a.on_evict = [](void * c, const hotmoe_event *, int32_t n, const int32_t * experts) {
            ((judge *) c)->lost.insert(((judge *) c)->lost.end(), experts, experts + n);
        };
        a.reset = [](void * c) { ((judge *) c)->n_resets++; };
        return a;
    }
};

static void test_loans() {
    spy               s;
    judge             j;
    slot_map          map(10, 4, s.policy(), j.admission());
    slot_event_result r;

    // not admitted: a slot all the same, but the policy does not hear of it
    j.refused = { 1, 2 };
    CHECK(run(map, { 1, 2, 3 }, r));
    CHECK(j.asked == ints({ 1, 2, 3 }) && r.n_refused == 2 && r.loads.size() == 3);
    CHECK(s.loaded == ints({ 3 }));
    CHECK(map.slot_of(1) >= 0 && map.slot_of(2) >= 0);

    // free slots first, then those on loan, the oldest first, without asking the policy
    s.calls.clear();
    CHECK(run(map, { 4 }, r) && r.evicted.empty());
    CHECK(run(map, { 5 }, r));
    CHECK(r.evicted == ints({ 1 }) && j.lost == ints({ 1 }));
    CHECK(s.calls.find('s') == std::string::npos && s.calls.find('e') == std::string::npos);

    // used again while on loan: judged again; admitted, it keeps its slot, and nothing is loaded
    j.refused = {};
    s.calls.clear();
    const int32_t slot = map.slot_of(2);
    CHECK(run(map, { 2 }, r));
    CHECK(j.asked == ints({ 2 }) && r.n_hits == 1 && r.loads.empty() && map.slot_of(2) == slot);
    CHECK(s.calls == "al" && s.loaded == ints({ 2 }) && s.slots == ints({ slot }));

    // admitted ones are not judged again, and are the policy's to evict
    j.asked.clear();
    CHECK(run(map, { 2, 3 }, r) && j.asked.empty());
    s.answer = { 4 };
    CHECK(run(map, { 6 }, r));
    CHECK(sorted(s.candidates) == ints({ 2, 3, 4, 5 }) && r.evicted == ints({ 4 }) && j.lost.back() == 4);

    // those on loan and the policy's victims together; the event's own loans stay
    j.refused = { 7, 8, 9 };
    s.answer  = { 2 };
    CHECK(run(map, { 7 }, r)); // 7 on loan in the place of 2
    s.answer = { 3 };
    CHECK(run(map, { 7, 8 }, r));
    CHECK(r.evicted == ints({ 3 }) && map.slot_of(7) >= 0 && map.slot_of(8) >= 0);
    s.answer = { 5 };
    CHECK(run(map, { 0, 1, 9 }, r)); // three needed: 7, 8 and one of the policy's
    CHECK(r.evicted == ints({ 7, 8, 5 }));

    // a refused answer admits all
    j.result  = 0;
    j.refused = { 3 };
    s.answer  = { 6 };
    CHECK(run(map, { 3 }, r) && r.fallback && r.n_refused == 0);

    map.clear();
    CHECK(j.n_resets == 1 && map.slot_of(3) == -1);
}

static void test_no_slot_for_the_refused() {
    spy               s;
    judge             j;
    slot_map          map(10, 3, s.policy(), j.admission(), true);
    slot_event_result r;

    j.refused = { 1, 2 };
    CHECK(run(map, { 1, 2, 3 }, r));
    CHECK(r.loads.size() == 1 && r.loads[0].expert == 3 && map.slot_of(1) == -1 && r.n_misses == 3 && r.n_refused == 2);

    // more experts than slots: as many as there is room for
    CHECK(run(map, { 4, 5, 6, 7 }, r));
    CHECK(r.loads.size() == 3 && r.evicted == ints({ 3 }) && map.slot_of(7) == -1);

    // a pinned expert leaves less room
    CHECK(map.pin(4));
    CHECK(run(map, { 7, 8, 9 }, r));
    CHECK(r.loads.size() == 2 && map.slot_of(4) >= 0 && map.slot_of(9) == -1);
}

static void test_pins_drops_and_prefetch() {
    spy               s;
    judge             j;
    slot_map          map(10, 4, s.policy(), j.admission());
    slot_event_result r;
    int32_t           bad = 0;

    CHECK(run(map, { 0, 1, 2, 3 }, r));
    CHECK(!map.pin(7) && map.pin(0) && map.pin(0) && map.pin(1));

    // pinned experts are no candidates, even for the fallback
    s.answer = { 0 };
    CHECK(run(map, { 4 }, r) && r.fallback);
    CHECK(sorted(s.candidates) == ints({ 2, 3 }) && r.evicted == ints({ 2 }));

    // what does not fit beside them is refused, and nothing changes
    const ints before = resident(map);
    CHECK(!run(map, { 5, 6, 7 }, r, &bad) && bad == -1 && resident(map) == before);
    CHECK(run(map, { 0, 5, 6 }, r)); // 0 is pinned, but of the event
    CHECK(map.unpin(0) && map.unpin(0) && !map.unpin(0) && map.unpin(1));

    // dropped: its slot is free, both are told, outside of an event
    s.calls.clear();
    j.lost.clear();
    CHECK(map.drop(5) && !map.drop(5) && map.slot_of(5) == -1);
    CHECK(s.calls == "e" && s.evicted == ints({ 5 }) && j.lost == ints({ 5 }));

    // prefetched: on loan, in a free slot or in the place of another on loan, never in that of an admitted one (CASE 18)
    s.calls.clear();
    CHECK(map.prefetch(8) >= 0 && map.prefetch(8) == -1);
    const int32_t slot = map.slot_of(8);
    CHECK(map.prefetch(9) == slot && map.slot_of(8) == -1);
    CHECK(s.calls.empty());
    CHECK(run(map, { 9 }, r) && r.n_hits == 1 && s.loaded == ints({ 9 })); // used: now it is admitted
    CHECK(map.prefetch(7) == -1 && map.slot_of(7) == -1); // all are hot: there is no room
}

static void test_weights() {
    spy               s;
    judge             j;
    slot_map          map(10, 6, s.policy(), j.admission());
    slot_event_result r;
    int32_t           bad       = 0;
    const int32_t     ids[]     = { 3, 5, 3, 1 };
    const float       weights[] = { 0.5f, 0.25f, 1.0f, 0.125f };
    CHECK(map.acquire(ids, weights, 4, {}, r, &bad));
    CHECK(j.weights == std::vector<float>({ 1.5f, 0.25f, 0.125f })); // summed over the tokens
    CHECK(run(map, { 0 }, r) && j.weights.empty());
}

int main() {
    test_event();
    test_loans();
    test_no_slot_for_the_refused();
    test_pins_drops_and_prefetch();
    test_weights();
    test_lying_policies();
    test_refused_events();
    test_built_in_policies();
    std::printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}
