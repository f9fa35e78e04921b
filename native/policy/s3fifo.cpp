// S3-FIFO (Yang, Zhang, Qiu, Yue and Vigfusson, "FIFO queues are all you need for cache eviction", SOSP 2023).
//
// A loaded expert enters a small queue. Most that enter are not needed again soon; they leave at the queue's end, and their ids
// are remembered in a ghost queue. Those that were hit while in the small queue go on to the main queue instead, and so does
// whatever is loaded while its id is in the ghost queue. At the end of the main queue an expert that was hit since goes back to
// its beginning, once for each hit, of which up to 3 are counted; one that was not leaves. (The paper wants two hits for the way
// from small to main. In pools of some dozen slots, with a small queue of a few, one did better.)
//
// The small queue gets `small` (0.1) of the slots, at least one; it is where experts leave whenever it holds as many as that,
// otherwise they leave the main queue. The ghost queue remembers as many ids as the main queue has slots.
//
// As events are atomic, the experts that leave in an event do so one after the other before those that it loads enter. Experts
// that may not be evicted, those of the event itself and pinned ones, are passed over and keep their place. A queue without
// candidates leaves the choice to the other one.
//
// Cost per event: one increment per expert; if something must go, a walk from the ends of the queues to the first victims.

#include "policies.h"
#include "policy_util.h"

#include <deque>
#include <vector>

struct policy_s3fifo : policy_base {
    enum place : uint8_t { absent,
                           in_small,
                           in_main };

    static constexpr uint8_t max_hits = 3;

    size_t               max_small;
    size_t               max_ghost;
    std::deque<int32_t>  small_queue; // the end, where experts leave, is in front
    std::deque<int32_t>  main_queue;
    std::deque<int32_t>  ghost_queue;
    std::vector<uint8_t> where;    // per expert
    std::vector<uint8_t> hits;     // per expert, while it is in a queue
    std::vector<uint8_t> is_ghost; // per expert
    std::vector<uint8_t> may_go;   // per expert: a candidate

    policy_s3fifo(int32_t n_expert, int32_t n_slots, size_t max_small)
        : max_small(max_small), max_ghost(std::max<size_t>(1, n_slots - max_small)), where(n_expert, absent), hits(n_expert, 0), is_ghost(n_expert, 0),
          may_go(n_expert, 0) {}

    void on_access(const hotmoe_event & event) {
        for (int32_t i = 0; i < event.n_experts; i++) {
            const int32_t id = event.experts[i];
            if (where[id] != absent && hits[id] < max_hits) {
                hits[id]++;
            }
        }
    }

    int32_t select_evict(int32_t n, const int32_t * candidates, int32_t n_candidates, int32_t * victims) {
        for (int32_t i = 0; i < n_candidates; i++) {
            may_go[candidates[i]] = 1;
        }
        for (int32_t i = 0; i < n; i++) {
            int32_t id = -1;
            if (small_queue.size() >= max_small) {
                id = leave_small();
            }
            if (id < 0) {
                id = leave_main();
            }
            if (id < 0) {
                id = leave_small();
            }
            if (id < 0) { // what sits in the small queue has moved to the main queue
                id = leave_main();
            }
            victims[i] = id;
            if (id >= 0) {
                may_go[id] = 0;
            }
        }
        for (int32_t i = 0; i < n_candidates; i++) {
            may_go[candidates[i]] = 0;
        }
        return n;
    }

    // The next expert to leave the small queue, -1 if none may; those that were hit move to the main queue.
    int32_t leave_small() {
        for (size_t i = 0; i < small_queue.size();) {
            const int32_t id = small_queue[i];
            if (!may_go[id]) {
                i++;
                continue;
            }
            small_queue.erase(small_queue.begin() + i);
            if (hits[id] == 0) {
                where[id] = absent;
                remember(id);
                return id;
            }
            enter(main_queue, in_main, id);
        }
        return -1;
    }

    // The next expert to leave the main queue, -1 if none may. Ends, as each round takes a hit from every candidate.
    int32_t leave_main() {
        for (size_t i = 0; i < main_queue.size();) {
            const int32_t id = main_queue[i];
            if (!may_go[id]) {
                i++;
                continue;
            }
            main_queue.erase(main_queue.begin() + i);
            if (hits[id] == 0) {
                where[id] = absent;
                return id;
            }
            hits[id]--;
            main_queue.push_back(id);
        }
        return -1;
    }

    void enter(std::deque<int32_t> & queue, place to, int32_t id) {
        queue.push_back(id);
        where[id] = to;
        hits[id]  = 0;
    }

    void remember(int32_t id) {
        ghost_queue.push_back(id);
        is_ghost[id] = 1;
        if (ghost_queue.size() > max_ghost) {
            is_ghost[ghost_queue.front()] = 0;
            ghost_queue.pop_front();
        }
    }

    void on_evict(int32_t n, const int32_t * experts) {
        for (int32_t i = 0; i < n; i++) { // those that select_evict chose are out already
            const int32_t id = experts[i];
            if (where[id] != absent) {
                std::deque<int32_t> & queue = where[id] == in_small ? small_queue : main_queue;
                queue.erase(std::find(queue.begin(), queue.end(), id));
                where[id] = absent;
            }
        }
    }

    void on_load(int32_t n, const int32_t * experts) {
        for (int32_t i = 0; i < n; i++) {
            const int32_t id = experts[i];
            if (is_ghost[id]) {
                is_ghost[id] = 0;
                ghost_queue.erase(std::find(ghost_queue.begin(), ghost_queue.end(), id));
                enter(main_queue, in_main, id);
            } else {
                enter(small_queue, in_small, id);
            }
        }
    }

    void reset() {
        small_queue.clear();
        main_queue.clear();
        ghost_queue.clear();
        std::fill(where.begin(), where.end(), absent);
        std::fill(hits.begin(), hits.end(), 0);
        std::fill(is_ghost.begin(), is_ghost.end(), 0);
    }
};

hotmoe_policy policy_s3fifo_create(const hotmoe_policy_config & config, policy_options & options) {
    const double share = options.number("small", 0.1, 0.0, 1.0);
    return policy_wrap(new policy_s3fifo(config.n_expert, config.n_slots, std::max(1, (int32_t) (config.n_slots * share))));
}
