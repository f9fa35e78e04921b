#pragma once

// One pool: the slots of one bank on one device, its table for the id remap, its slot map and its counters.
//
// Addresses never change during a pool's life (captured device graphs replay them). Residency is keyed by the pool, that
// is by (context, layer, bank), and the expert.

#include "expert_feed.h"
#include "expert_stream.h"
#include "host_slots.h"
#include "routing.h"
#include "slot_map.h"
#include "wave_memory.h"
#include "waves.h"

#include "hotmoe/cache.h"
#include "hotmoe/testing.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

// Bytes after the last slot of each tensor: kernels that read whole tiles may run past the last row.
constexpr size_t POOL_TAIL_BYTES = 512;

// What tensors of a GGUF file, and those of the CPU's kernels, are aligned to.
constexpr size_t TENSOR_ALIGNMENT = 32;

class expert_pool {
  public:
    // Allocates nothing yet. `host` are the expert tensors of the bank, in host memory.
    expert_pool(int32_t layer, int32_t bank, ggml_backend_dev_t dev, const std::vector<ggml_tensor *> & host);
    ~expert_pool();

    // Allocate and zero the slots and the table. false: the device refused. Takes ownership of policy and admission. With
    // n_spare, there are that many slots more, which hold no expert: what a wave leaves out goes there.
    bool allocate(int32_t n_slots, int32_t n_spare, const hotmoe_policy & policy, const hotmoe_admission & admission);

    // The event of the split that is about to run on `backend`: ids are read from `src`, router weights from `weights` (may be
    // NULL), both on src_backend; missing experts and the table are queued on `backend`. Order: the read-back waits for src_backend; if that is not `backend`, `backend` is
    // waited for, too, since kernels of the previous pass may still read slots that are overwritten here. What is queued
    // here runs before the split, in stream order.
    ggml_status run(const ggml_tensor * src, const ggml_tensor * weights, ggml_backend_t src_backend, ggml_backend_t backend,
                    const hotmoe_event & event);

    // The same for an event that runs in waves: called before each of them, with the tensors of the graph that tell what a
    // wave computes. n_used: experts per token; by_pair: the input has a row for each pair, not for each token. `nothing`: a
    // warm-up, of which nothing is computed and nothing loaded. The caller goes on as long as more_waves() says so, and calls
    // end_event() whatever happens.
    ggml_status run_wave(const ggml_tensor * src, const ggml_tensor * weights, const wave_tensors & to, int32_t n_used, bool by_pair, bool nothing,
                         ggml_backend_t src_backend, ggml_backend_t backend, const hotmoe_event & event);

    // The same for an event whose experts mul_mat_id is fed with, however many they are: `nothing` as above.
    ggml_status run_fed(const ggml_tensor * src, const ggml_tensor * weights, bool nothing, ggml_backend_t src_backend, ggml_backend_t backend,
                        const hotmoe_event & event);

    // The event that was begun last is over, or will not be completed.
    void end_event();

    // Width of the block's results.
    int64_t n_embd() const;

    // Whether an event of n_pairs of a token and one of its experts surely fits in the slots.
    bool fits(int64_t n_pairs) const { return std::min<int64_t>(map->n_expert(), n_pairs) <= map->n_slots(); }

    // Pairs that a wave has room for, in an event of n_tokens tokens that use n_used experts each.
    int64_t wave_room(int64_t n_used, int64_t n_tokens) const;
    bool    more_waves() const { return wave >= 0 && wave + 1 < plan.size(); }
    bool    in_waves() const { return wave >= 0; }

    // How events that need more experts than there are slots are served: the CPU's matmuls wait for each of them, on a device
    // they run in waves. Neither: such events take the stock path.
    bool is_fed() const { return stream && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU; }
    bool has_waves() const { return stream && !is_fed(); }

    // The tensor that stands in for host tensor t in graphs, or NULL: slots, or what feeds experts.
    ggml_tensor * stand_in(const ggml_tensor * t) const;

    uint64_t        expert_bytes() const;              // one expert, all tensors
    static uint64_t fixed_bytes(const std::vector<ggml_tensor *> & host, ggml_backend_buffer_type_t buft, int32_t n_spare); // all but slots, at most
    uint64_t        pool_bytes() const { return buffer ? ggml_backend_buffer_get_size(buffer.get()) : 0; }

    bool         read_slot(int32_t t, int32_t slot, void * data, size_t size) const;
    const void * host_expert(int32_t t, int32_t expert, size_t * size) const;

    const int32_t            layer;
    const int32_t            bank;
    const ggml_backend_dev_t dev;

    std::vector<ggml_tensor *> host;  // [n_tensors] sources
    std::vector<ggml_tensor *> slots; // [n_tensors] ne[2] = n_slots
    ggml_tensor *              table = nullptr; // i32 [1, n_expert] expert -> slot
    std::unique_ptr<slot_map>  map;

    std::unique_ptr<expert_stream> stream; // NULL: the experts lie in host memory
    std::unique_ptr<host_slots>    tier2;  // for a stream whose pool is on a device
    std::unique_ptr<expert_feed>   feed;   // if it is fed

    const routing & last_routing() const { return routed; }

    hotmoe_counters counters[HOTMOE_PHASE_COUNT] = {};
    std::string     error; // why the last run failed
    bool            store_failed = false; // ... because bytes could not be read
    int32_t         fault        = HOTMOE_FAULT_NONE;
    bool            overlap      = true; // hits compute while misses are read

  private:
    bool check_backend(ggml_backend_t backend);
    bool acquire(const int32_t * ids, const float * weights, int64_t n, const hotmoe_event & event, slot_event_result & result);
    bool bring(const slot_event_result & r, ggml_backend_t backend, const hotmoe_event & event);
    void sum_weights();
    void upload(const slot_load & load, const void * const * data, ggml_backend_t backend, hotmoe_counters & c);
    void write_table(const std::vector<slot_load> & loads, ggml_backend_t backend);
    bool plan_event(int32_t width, int64_t room);
    bool acquire_wave(int32_t number, const hotmoe_event & event);
    bool give_slots(const hotmoe_event & event);
    void unpin_wave(int32_t number);
    void note_loads(const std::vector<slot_load> & loads);
    void count(const slot_event_result & r, const hotmoe_event & event);

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;

    std::vector<int32_t> table_host; // source of the queued copy: changed only after `backend` was waited for
    std::vector<int32_t> table_stale;
    bool                 table_behind = false; // table_host has entries that were not written to the device
    routing              routed;
    slot_event_result    result;

    // the event that runs in waves, or whose experts are fed
    wave_plan                      plan;
    int32_t                        wave = -1; // the one that computes now; -1: none
    std::vector<uint8_t>           resident;  // per expert
    std::vector<int32_t>           wave_ids;  // what the slot map is asked for
    std::vector<float>             wave_weights;
    std::vector<expert_feed::item> items;
    struct wave_arrays {
        std::vector<int32_t> sources, experts, slots;
        std::vector<int64_t> rows;
    };
    std::vector<wave_arrays> arrays; // per wave: sources of queued copies

    std::vector<ggml_tensor *> fed;  // [n_tensors] what stands in for the host tensors; see expert_feed
    std::vector<const void *>  data; // scratch, as the next two
    std::vector<float>         weight_of; // per expert
    std::vector<float>         host_weights; // of what is looked up in tier 2
};
