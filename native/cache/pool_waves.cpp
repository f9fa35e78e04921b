// Events of a pool that need more experts than there are slots: in waves on a device, one after the other on the CPU.

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

// Note which experts have slots, and plan the order of all: at most `width` of them at a time, that have at most `room` pairs.
bool expert_pool::plan_event(int32_t width, int64_t room) {
    for (const int32_t id : routed.ids) {
        if (id < 0 || id >= map->n_expert()) {
            error = "expert id " + std::to_string(id) + " is not in [0, " + std::to_string(map->n_expert()) + ")";
            return false;
        }
    }
    resident.resize(map->n_expert());
    for (int32_t e = 0; e < map->n_expert(); e++) {
        resident[e] = map->slot_of(e) >= 0 && fault != HOTMOE_FAULT_WAVE_ORDER;
    }
    plan.make(routed.ids.data(), (int64_t) routed.ids.size(), resident, width, room);
    return true;
}

// Give a wave's experts slots; `result` says which of them are to be brought in.
bool expert_pool::acquire_wave(int32_t number, const hotmoe_event & event) {
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
    count(result, event);
    return true;
}

//
// on the CPU
//

// Give all experts of the event slots, in the order of the plan: `items`. A wave may not take the slots of the one before it,
// so that these need not have been computed when its reading begins; nor those of experts that are there and come later.
bool expert_pool::give_slots(const hotmoe_event & event) {
    const int64_t n_pairs = (int64_t) routed.ids.size();
    const bool    at_once = fits(n_pairs);
    items.clear();
    if (!plan_event(at_once ? map->n_expert() : std::max(1, map->n_slots() / 2), n_pairs)) {
        return false;
    }
    if (!at_once) {
        counters[event.phase].waves += plan.size();
    }
    // pinned for as long as slots are given away; what is computed when is for the feed to see
    for (int32_t e = 0; e < map->n_expert(); e++) {
        if (resident[e] && plan.wave_of(e) >= 0) {
            map->pin(e);
        }
    }
    int32_t n_past = 0; // waves whose slots may be taken
    bool    done   = true;
    for (int32_t w = 0; w < plan.size() && done; w++) {
        for (; n_past < w - 1; n_past++) {
            unpin_wave(n_past);
        }
        done = acquire_wave(w, event);
        if (!done && n_past < w) { // there are hardly any slots
            unpin_wave(n_past++);
            done = acquire_wave(w, event);
        }
        if (!done) {
            break;
        }
        for (const slot_load & load : result.loads) {
            map->pin(load.expert);
        }
        for (const int32_t e : plan.experts(w)) {
            const bool read = std::any_of(result.loads.begin(), result.loads.end(), [e](const slot_load & load) { return load.expert == e; });
            items.push_back({ e, map->slot_of(e), read && fault != HOTMOE_FAULT_NO_UPLOAD });
            done = done && items.back().slot >= 0;
        }
    }
    for (; n_past < plan.size(); n_past++) {
        unpin_wave(n_past);
    }
    if (!done) {
        for (const expert_feed::item & i : items) {
            if (i.read) {
                map->drop(i.expert); // nothing was read
            }
        }
    }
    return done;
}

ggml_status expert_pool::run_fed(const ggml_tensor * src, const ggml_tensor * weights, bool nothing, ggml_backend_t src_backend, ggml_backend_t backend,
                                 const hotmoe_event & event) {
    const hook_clock::time_point t_start = hook_clock::now();

    if (!check_backend(backend) || !routed.read(src, weights, src_backend, error)) {
        return GGML_STATUS_FAILED;
    }
    ggml_backend_synchronize(src_backend);
    const hook_clock::time_point t_ids = hook_clock::now();

    end_event();
    items.clear();
    if (!nothing) {
        if (stream->stuck()) {
            error        = "a reader hangs since an earlier error: load the model again";
            store_failed = true;
            return GGML_STATUS_FAILED;
        }
        if (!give_slots(event)) {
            return GGML_STATUS_FAILED;
        }
        counters[event.phase].events++;
    }
    feed->lose_reads  = fault == HOTMOE_FAULT_READ_LOST;
    feed->next_slot   = fault == HOTMOE_FAULT_WAVE_SLOTS;
    feed->reuse_early = fault == HOTMOE_FAULT_REUSE_EARLY;
    feed->begin(items);
    if (!overlap && !feed->wait_for_first_reads()) {
        end_event();
        return GGML_STATUS_FAILED;
    }

    hotmoe_counters & c = counters[event.phase];
    c.wait_ns          += ns_between(t_start, t_ids);
    c.hook_ns          += ns_between(t_ids, hook_clock::now());
    return GGML_STATUS_SUCCESS;
}

void expert_pool::end_event() {
    if (feed) {
        const std::string why = feed->error();
        for (const expert_feed::item & i : feed->end()) {
            if (map->slot_of(i.expert) == i.slot) { // it may have lost it again
                map->drop(i.expert);
            }
        }
        if (!why.empty()) {
            error        = why;
            store_failed = true;
        }
    }
    for (; wave >= 0 && wave < plan.size(); wave++) { // the evaluation failed in between
        unpin_wave(wave);
    }
    wave = -1;
}

//
// on a device
//

int64_t expert_pool::wave_room(int64_t n_used, int64_t n_tokens) const {
    const int64_t n_pairs = n_used * n_tokens;
    const int64_t most    = std::min<int64_t>(map->n_expert(), n_pairs); // experts
    // half as much again as waves need on average, since experts differ; an expert can be used by all tokens
    const int64_t n_waves = (most + map->n_slots() - 1) / map->n_slots();
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
    // later waves are queued behind the one that computes: their experts are read meanwhile
    if (first) {
        ggml_backend_synchronize(src_backend);
        if (src_backend != backend) {
            ggml_backend_synchronize(backend);
        }
        tier2->done();
    }
    const hook_clock::time_point t_ids = hook_clock::now();

    hotmoe_counters & c = counters[event.phase];
    if (first) {
        if (nothing) {
            resident.assign(map->n_expert(), 0);
            plan.make_empty(map->n_expert());
        } else {
            if (!plan_event(map->n_slots(), ggml_nelements(to.sources))) {
                return GGML_STATUS_FAILED;
            }
            c.events++;
        }
        for (int32_t e = 0; e < map->n_expert(); e++) {
            if (resident[e] && plan.wave_of(e) >= 0) {
                map->pin(e); // until it has computed
            }
        }
    } else {
        unpin_wave(wave);
    }
    wave++;
    if (!nothing) {
        if (!acquire_wave(wave, event)) {
            return GGML_STATUS_FAILED;
        }
        note_loads(result.loads);
        if (!bring(result, backend, event)) {
            return GGML_STATUS_FAILED;
        }
        c.waves++;
    }

    // which pairs, and where their rows go
    const int64_t n_pairs = (int64_t) routed.ids.size();
    const int64_t room    = ggml_nelements(to.sources);
    if (arrays.size() <= (size_t) wave) {
        arrays.resize(wave + 1);
    }
    wave_arrays & w = arrays[wave];
    w.sources.assign(room, 0);
    w.experts.assign(room, 0);
    w.slots.assign(room, map->n_slots()); // what is left over computes with a spare slot
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

void expert_pool::unpin_wave(int32_t number) {
    for (const int32_t id : plan.experts(number)) {
        map->unpin(id);
    }
}
