#include "expert_feed.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

// How long a thread waits for a read before it sleeps.
static constexpr int64_t SPIN_US = 300;

expert_feed::expert_feed(expert_stream & stream, const std::vector<ggml_tensor *> & slots) : stream(stream), slots(slots), next(slots.size()) {
    for (size_t t = 0; t < slots.size(); t++) {
        sources.push_back({ this, (int32_t) t });
        computed.push_back((int32_t) t);
    }
    // what gate and up give goes into down
    std::stable_partition(computed.begin(), computed.end(), [&](int32_t t) { return std::string(slots[t]->name).find("_down_") == std::string::npos; });
    static const ggml_cpu_matrix_hooks hooks = { find, order, acquire, release };
    static std::once_flag              once; // another context may be computing
    std::call_once(once, [] { ggml_cpu_set_matrix_hooks(&hooks); });
}

expert_feed::~expert_feed() {
    end();
}

// Where a stand-in tells its source: weights have no parameters of their own, and kernels do not look at them. (Some take a tensor
// with an `extra` for one that was repacked.)
struct fed_params {
    const char * tag;
    void *       source;
};
static constexpr char FED_TAG[] = "hotmoe fed";
static_assert(sizeof(fed_params) <= sizeof(ggml_tensor::op_params), "it has no room for them");

void expert_feed::stand_in(int32_t t, ggml_tensor * tensor) {
    tensor->buffer          = slots[t]->buffer;
    tensor->data            = slots[t]->data;
    const fed_params params = { FED_TAG, &sources[t] };
    std::memcpy(tensor->op_params, &params, sizeof(params));
}

void * expert_feed::find(const ggml_tensor * weight) {
    fed_params params;
    std::memcpy(&params, weight->op_params, sizeof(params));
    return weight->op == GGML_OP_NONE && params.tag == FED_TAG ? params.source : nullptr;
}

const int32_t * expert_feed::order(void * source, int * n) {
    const expert_feed & feed = *((struct source *) source)->feed;
    *n                       = (int) feed.experts.size();
    return feed.experts.data();
}

int expert_feed::acquire(void * source, int k) {
    const auto & from = *(struct source *) source;
    return from.feed->acquire_part(from.t, k);
}

void expert_feed::release(void * source, int k, int n_threads) {
    const auto & from = *(struct source *) source;
    from.feed->release_part(from.t, k, n_threads);
}

//
// an event
//

void expert_feed::begin(const std::vector<item> & event) {
    items = event;
    experts.clear();
    before.assign(items.size(), -1);
    is_followed.assign(items.size(), 0);
    if (n_parts < slots.size() * items.size()) {
        n_parts = slots.size() * items.size();
        parts   = std::make_unique<part[]>(n_parts);
    }
    last_in.assign(slots[0]->ne[2], -1);
    for (size_t k = 0; k < items.size(); k++) {
        experts.push_back(items[k].expert);
        int32_t & last = last_in[items[k].slot];
        before[k]      = last;
        if (last >= 0) {
            is_followed[last] = 1;
        }
        last = (int32_t) k;
        for (size_t t = 0; t < slots.size(); t++) {
            part & p     = at((int32_t) t, k);
            p.state      = items[k].read ? TO_READ : THERE;
            p.n_released = 0;
            p.ticket     = 0;
            p.waited_on  = false;
        }
    }
    failed = false;
    why.clear();
    n_threads = 0;

    std::lock_guard<std::mutex> lock(mutex);
    bool                        any = false;
    for (size_t i = 0; i < computed.size(); i++) {
        next[computed[i]] = 0;
        any               = start_reads(computed[i], (int32_t) i) || any;
    }
    if (any) {
        stream.wake();
    }
}

// Begin to read into all slots of tensor t that are free for the next items. The mutex is held.
bool expert_feed::start_reads(int32_t t, int32_t priority) {
    bool any = false;
    for (; next[t] < items.size() && !failed; next[t]++) {
        const size_t k = next[t];
        if (!items[k].read) {
            continue;
        }
        if (before[k] >= 0 && !reuse_early && (n_threads == 0 || at(t, before[k]).n_released < n_threads)) {
            break;
        }
        const ggml_tensor * s = slots[t];
        at(t, k).ticket       = stream.start(t, items[k].expert, (char *) s->data + items[k].slot * s->nb[2], priority);
        at(t, k).state        = READING;
        any                   = true;
    }
    return any;
}

int32_t expert_feed::acquire_part(int32_t t, int32_t k) {
    if (at(t, k).state.load(std::memory_order_acquire) != THERE && !wait(t, k)) {
        return -1;
    }
    return next_slot ? (items[k].slot + 1) % (int32_t) slots[t]->ne[2] : items[k].slot;
}

// Until item k of tensor t is there. The first thread that wants it waits for the reader, the others for that thread.
bool expert_feed::wait(int32_t t, int32_t k) {
    part & p = at(t, k);
    if (p.state == READING && !lose_reads) {
        // it often comes sooner than a thread is put to sleep and woken
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_US);
        while (p.state == READING && !stream.done(p.ticket) && std::chrono::steady_clock::now() < until) {
            std::this_thread::yield();
        }
    }
    std::unique_lock<std::mutex> lock(mutex);
    while (p.state != THERE && !failed) {
        if (p.state != READING || p.waited_on) {
            changed.wait(lock);
            continue;
        }
        if (lose_reads) {
            return true;
        }
        p.waited_on = true;
        lock.unlock();
        std::string error;
        const bool  arrived = stream.wait(p.ticket, error);
        lock.lock();
        p.ticket = 0;
        p.state  = arrived ? THERE : FAILED;
        if (!arrived && !failed) {
            failed = true;
            why    = error;
        }
        changed.notify_all();
    }
    return !failed;
}

void expert_feed::release_part(int32_t t, int32_t k, int32_t threads) {
    if (!is_followed[k] || at(t, k).n_released.fetch_add(1) + 1 < threads) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex);
    n_threads = threads;
    if (start_reads(t, 0)) {
        stream.wake();
        changed.notify_all();
    }
}

bool expert_feed::wait_for_first_reads() {
    for (int32_t t = 0; t < (int32_t) slots.size(); t++) {
        for (size_t k = 0; k < next[t]; k++) {
            if (at(t, k).state != THERE && !wait(t, (int32_t) k)) {
                return false;
            }
        }
    }
    return true;
}

std::vector<expert_feed::item> expert_feed::end() {
    std::vector<item> incomplete;
    for (size_t k = items.size(); k-- > 0;) { // the last that were asked for, which have not begun, are dropped first
        bool complete = true;
        for (int32_t t = 0; t < (int32_t) slots.size(); t++) {
            part & p = at(t, k);
            if (p.ticket != 0) {
                stream.cancel(p.ticket);
                p.ticket = 0;
            }
            complete = complete && (p.state == THERE || (lose_reads && p.state == READING));
        }
        if (!complete) {
            incomplete.push_back(items[k]);
        }
    }
    items.clear();
    experts.clear();
    why.clear();
    return incomplete;
}

std::string expert_feed::error() const {
    std::lock_guard<std::mutex> lock(mutex);
    return why;
}
