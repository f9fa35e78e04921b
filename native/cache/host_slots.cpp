#include "host_slots.h"

#include "store/stream_buffer.h"

static constexpr size_t PAGE = 4096;

uint64_t host_slots::fixed_bytes(size_t n_tensors) {
    return (2 * n_tensors + 1) * PAGE;
}

std::unique_ptr<host_slots> host_slots::create(const std::vector<ggml_tensor *> & tensors, int32_t n_slots, ggml_backend_buffer_type_t buft,
                                               const hotmoe_policy & policy, const hotmoe_admission & admission) {
    std::unique_ptr<host_slots> made(new host_slots((int32_t) tensors[0]->ne[2], n_slots, policy, admission));
    size_t                      size = 0;
    for (const ggml_tensor * t : tensors) {
        size += (t->nb[2] * n_slots + 2 * PAGE) / PAGE * PAGE;
    }
    made->buffer.reset(ggml_backend_buft_alloc_buffer(buft, size + PAGE));
    if (!made->buffer || !ggml_backend_buffer_is_host(made->buffer.get())) {
        return nullptr;
    }
    // each tensor's slots lie modulo the page as its experts do in the file: then reads need no copy
    uintptr_t at = (uintptr_t) ggml_backend_buffer_get_base(made->buffer.get());
    at           = (at + PAGE - 1) / PAGE * PAGE;
    for (const ggml_tensor * t : tensors) {
        const file_range * range = streamed_experts_of(t)->find(t);
        made->bases.push_back((char *) at + (range ? range->offset % PAGE : 0));
        made->strides.push_back(t->nb[2]);
        at += (t->nb[2] * n_slots + 2 * PAGE) / PAGE * PAGE;
    }
    return made;
}

void host_slots::done() {
    for (const int32_t e : in_use) {
        map.unpin(e);
    }
    in_use.clear();
}

void host_slots::clear() {
    done();
    map.clear();
}

void host_slots::released(const std::vector<int32_t> & experts, const hotmoe_event & event) {
    here.clear();
    for (const int32_t e : experts) {
        if (map.slot_of(e) >= 0) {
            here.push_back(e);
        }
    }
    int32_t bad_id = 0;
    if (!here.empty() && map.acquire(here.data(), nullptr, (int64_t) here.size(), event, result, &bad_id)) {
        count.policy_fallbacks += result.fallback;
    }
}

bool host_slots::fetch(expert_stream & stream, const int32_t * experts, const float * weights, int32_t n, const hotmoe_event & event,
                       std::vector<const void *> & data, std::string & error) {
    if (stream.stuck()) {
        error = "a reader hangs since an earlier error: load the model again";
        return false;
    }
    int32_t bad_id = 0;
    if (!map.acquire(experts, weights, n, event, result, &bad_id)) {
        error = "the host slots have no room for " + std::to_string(n) + " experts";
        return false;
    }
    count.policy_fallbacks += result.fallback;
    if (!result.loads.empty()) {
        const uint64_t ticket = stream.start(result.loads, [this](int32_t t, int32_t slot) { return at(t, slot); });
        if (!stream.wait(ticket, error)) {
            for (const slot_load & load : result.loads) {
                map.drop(load.expert);
            }
            if (stream.stuck()) {
                (void) buffer.release(); // see expert_stream::stuck
            }
            return false;
        }
    }
    count.hits         += result.n_hits;
    count.misses       += result.n_misses;
    count.evictions    += result.evicted.size();
    count.not_admitted += result.n_refused;

    data.clear();
    for (int32_t k = 0; k < n; k++) {
        map.pin(experts[k]);
        in_use.push_back(experts[k]);
        for (size_t t = 0; t < bases.size(); t++) {
            data.push_back(at((int32_t) t, map.slot_of(experts[k])));
        }
    }
    return true;
}
