#pragma once

// One pool: the slots of one bank on one device, its table for the id remap, its slot map and its counters.
//
// Addresses never change during a pool's life (captured device graphs replay them). Residency is keyed by the pool, that
// is by (context, layer, bank), and the expert.

#include "routing.h"
#include "slot_map.h"

#include "hotmoe/cache.h"
#include "hotmoe/testing.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <memory>
#include <string>
#include <vector>

// Bytes after the last slot of each tensor: kernels that read whole tiles may run past the last row.
constexpr size_t POOL_TAIL_BYTES = 512;

class expert_pool {
  public:
    // Allocates nothing yet. `host` are the expert tensors of the bank, in host memory.
    expert_pool(int32_t layer, int32_t bank, ggml_backend_dev_t dev, const std::vector<ggml_tensor *> & host);

    // Allocate and zero the slots and the table. false: the device refused. Takes ownership of policy and admission.
    bool allocate(int32_t n_slots, const hotmoe_policy & policy, const hotmoe_admission & admission);

    // The event of the split that is about to run on `backend`: ids are read from `src`, router weights from `weights` (may be
    // NULL), both on src_backend; missing experts and the table are queued on `backend`. Order: the read-back waits for src_backend; if that is not `backend`, `backend` is
    // waited for, too, since kernels of the previous pass may still read slots that are overwritten here. What is queued
    // here runs before the split, in stream order.
    ggml_status run(const ggml_tensor * src, const ggml_tensor * weights, ggml_backend_t src_backend, ggml_backend_t backend,
                    const hotmoe_event & event);

    // The pool tensor that stands in for host tensor t, or NULL.
    ggml_tensor * stand_in(const ggml_tensor * t) const;

    uint64_t        expert_bytes() const;              // one expert, all tensors
    static uint64_t fixed_bytes(const std::vector<ggml_tensor *> & host, ggml_backend_buffer_type_t buft);
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

    const routing & last_routing() const { return routed; }

    hotmoe_counters counters[HOTMOE_PHASE_COUNT] = {};
    std::string     error; // why the last run failed
    int32_t         fault = HOTMOE_FAULT_NONE;

  private:
    void upload(const slot_load & load, ggml_backend_t backend, hotmoe_counters & c);
    void write_table(const std::vector<slot_load> & loads, ggml_backend_t backend);

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;

    std::vector<int32_t> table_host; // source of the queued copy: changed only after `backend` was waited for
    std::vector<int32_t> table_stale;
    routing              routed;
    slot_event_result    result;
};
