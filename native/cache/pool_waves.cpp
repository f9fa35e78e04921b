// Events of a pool that run in waves.

#include "pool.h"

#include "hook_clock.h"

#include <algorithm>

int64_t expert_pool::n_embd() const {
    int64_t n = 0;
    for (const ggml_tensor * t : host) { // down is [n_ff, n_embd, n_expert], the others are [n_embd, ...]
        n = std::string(t->name).find("_down_") != std::string::npos ? t->ne[1] : n;
    }
    return n;
}

int64_t expert_pool::wave_room(int64_t n_used, int64_t n_tokens) const {
    const int64_t n_pairs = n_used * n_tokens;
    if (fits(n_pairs)) {
        return n_pairs; // one or two waves
    }
    const int64_t most = std::min<int64_t>(map->n_expert(), n_pairs); // experts
    // half as much again as waves need on average, since experts differ; an expert can be used by all tokens
    const int64_t n_waves = (most + wave_width() - 1) / wave_width();
    const int64_t of_one  = bank == 0 ? n_tokens : n_pairs; // experts of a second bank are groups: a token can use one twice
    return std::min(n_pairs, std::max(of_one, 3 * n_pairs / (2 * n_waves) + 1));
}

ggml_status expert_pool::run_wave(const ggml_tensor * src, const ggml_tensor * weights, const wave_tensors & to, int32_t n_used, bool by_pair, bool nothing,
                                  ggml_backend_t src_backend, ggml_backend_t backend, const hotmoe_event & event) {
    const hook_clock::time_point t_start = hook_clock::now();

    if (!check_backend(backend)) {
        return GGML_STATUS_FAILED;
    }
    const bool first = wave < 0;
    if (first && !routed.read(src, weights, src_backend, error)) {
        return GGML_STATUS_FAILED;
    }
    if (first || !reads_in_place()) { // later: tier 2 is filled anew, and what was queued from it must have left
        ggml_backend_synchronize(src_backend);
        if (src_backend != backend) {
            ggml_backend_synchronize(backend);
        }
    }
    const hook_clock::time_point t_ids = hook_clock::now();

    hotmoe_counters & c = counters[event.phase];
    if (first) {
        acquired = -1;
        in_parts = false;
        if (nothing) {
            resident.assign(map->n_expert(), 0);
            plan.make(nullptr, 0, resident, 1, 1);
            plan.make_empty();
            acquired = 0;
        } else {
            for (const int32_t id : routed.ids) {
                if (id < 0 || id >= map->n_expert()) {
                    error = "expert id " + std::to_string(id) + " is not in [0, " + std::to_string(map->n_expert()) + ")";
                    return GGML_STATUS_FAILED;
                }
            }
            resident.resize(map->n_expert());
            for (int32_t e = 0; e < map->n_expert(); e++) {
                resident[e] = map->slot_of(e) >= 0 && fault != HOTMOE_FAULT_WAVE_ORDER;
            }
            c.events++;
            const int64_t n = (int64_t) routed.ids.size();
            if (fits(n)) {
                // it fits: one event for the policies; what is there computes while the rest is read
                if (!acquire(routed.ids.data(), routed.weights_or_null(), n, event, result)) {
                    return GGML_STATUS_FAILED;
                }
                plan.make_hits_first(routed.ids.data(), n, resident);
                acquired = plan.size() - 1;
                count(result, event);
                note_loads(result.loads);
                if (!bring(result.loads, backend, event)) {
                    return GGML_STATUS_FAILED;
                }
            } else {
                // while one wave computes, the next one's experts are read: half of the slots for each
                in_parts = true;
                plan.make(routed.ids.data(), n, resident, wave_width(), ggml_nelements(to.sources));
                for (int32_t e = 0; e < map->n_expert(); e++) {
                    if (resident[e] && plan.wave_of(e) >= 0 && fault != HOTMOE_FAULT_WAVE_PINS) {
                        map->pin(e);
                    }
                }
            }
        }
    } else {
        unpin_wave(wave);
    }
    wave++;
    if (acquired < wave && !acquire_wave(wave, false, backend, event)) {
        return GGML_STATUS_FAILED;
    }
    if (needs_reads(wave) && !finish_reads()) {
        return GGML_STATUS_FAILED;
    }

    // which pairs, and where their rows go
    const int64_t n_pairs = (int64_t) routed.ids.size();
    const int64_t room    = ggml_nelements(to.sources);
    if (arrays.size() <= (size_t) wave) {
        arrays.resize(wave + 1);
    }
    wave_arrays & w = arrays[wave];
    // what is left over: the CPU skips negative ids; other devices compute with a spare slot
    w.sources.assign(room, 0);
    w.experts.assign(room, 0);
    w.slots.assign(room, skips_negative_ids() ? -1 : map->n_slots());
    w.rows.assign(room, fault == HOTMOE_FAULT_WAVE_ROWS ? 0 : n_pairs);
    int64_t n = 0;
    for (int64_t p = 0; p < n_pairs; p++) {
        const int32_t id = routed.ids[p];
        if (plan.wave_of(id) != wave) {
            continue;
        }
        if (n == room) {
            error = "a wave has more pairs than there is room for";
            return GGML_STATUS_FAILED;
        }
        w.sources[n] = (int32_t) (by_pair ? p : p / n_used);
        w.experts[n] = id;
        w.slots[n]   = fault == HOTMOE_FAULT_WAVE_SLOTS ? (map->slot_of(id) + 1) % map->n_slots() : map->slot_of(id);
        w.rows[n]    = p;
        n++;
    }
    ggml_backend_tensor_set_async(backend, to.sources, w.sources.data(), 0, room * sizeof(int32_t));
    ggml_backend_tensor_set_async(backend, to.experts, w.experts.data(), 0, room * sizeof(int32_t));
    ggml_backend_tensor_set_async(backend, to.slots, w.slots.data(), 0, room * sizeof(int32_t));
    ggml_backend_tensor_set_async(backend, to.rows, w.rows.data(), 0, room * sizeof(int64_t));

    if (reads_in_place() && wave + 1 < plan.size() && acquired == wave) {
        const bool arrived = acquire_wave(wave + 1, true, backend, event);
        if (!arrived && store_failed) {
            return GGML_STATUS_FAILED;
        }
    }
    c.waves   += in_parts;
    c.wait_ns += ns_between(t_start, t_ids);
    c.hook_ns += ns_between(t_ids, hook_clock::now());
    return GGML_STATUS_SUCCESS;
}

// Waves do not look at the table, but what comes after them does.
void expert_pool::note_loads(const std::vector<slot_load> & loads) {
    for (const slot_load & load : loads) {
        if (fault != HOTMOE_FAULT_WAVE_TABLE) {
            table_host[load.expert] = load.slot;
            table_behind            = true;
        }
    }
}

// Whether a wave's experts are among those that are being read.
bool expert_pool::needs_reads(int32_t number) const {
    for (const slot_load & load : reading) {
        if (plan.wave_of(load.expert) == number) {
            return true;
        }
    }
    return false;
}

// Give a wave's experts slots and begin to bring them in. They are pinned until they have computed, as those are that were
// there before, so a wave can be given slots ahead of its time: false then may say that there is no room yet.
bool expert_pool::acquire_wave(int32_t number, bool ahead, ggml_backend_t backend, const hotmoe_event & event) {
    wave_ids.clear();
    wave_weights.clear();
    for (size_t p = 0; p < routed.ids.size(); p++) {
        if (plan.wave_of(routed.ids[p]) == number) {
            wave_ids.push_back(routed.ids[p]);
            if (!routed.weights.empty()) {
                wave_weights.push_back(routed.weights[p]);
            }
        }
    }
    if (!acquire(wave_ids.data(), wave_weights.empty() ? nullptr : wave_weights.data(), (int64_t) wave_ids.size(), event, result)) {
        return false;
    }
    acquired = number;
    count(result, event);
    note_loads(result.loads);
    for (const slot_load & load : result.loads) {
        if (fault != HOTMOE_FAULT_WAVE_PINS) {
            map->pin(load.expert);
        }
    }
    return ahead ? (result.loads.empty() || start_reads(result.loads, true)) : bring(result.loads, backend, event);
}

void expert_pool::unpin_wave(int32_t number) {
    for (const int32_t id : plan.experts(number)) {
        map->unpin(id);
    }
}

void expert_pool::end_waves() {
    if (wave < 0) {
        return;
    }
    if (ticket != 0) { // the evaluation failed in between
        stream->cancel(ticket);
        ticket = 0;
        for (const slot_load & load : reading) {
            map->drop(load.expert);
        }
        reading.clear();
    }
    for (; wave < plan.size(); wave++) {
        unpin_wave(wave);
    }
    wave = acquired = -1;
}
