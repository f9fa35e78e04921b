#pragma once

// Tier 2 of one bank whose experts are streamed to a device: slots in host memory, filled from files.
//
// What the device misses is looked up here first. An expert that the device has needs no copy here, but one that was read for
// it stays until its slot is needed: the tiers are neither exclusive nor inclusive.

#include "expert_stream.h"
#include "slot_map.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <memory>
#include <string>
#include <vector>

class host_slots {
  public:
    // Slots in `buft`, which must be host memory. NULL: it could not be allocated. Takes ownership of policy and admission.
    static std::unique_ptr<host_slots> create(const std::vector<ggml_tensor *> & tensors, int32_t n_slots, ggml_backend_buffer_type_t buft,
                                              const hotmoe_policy & policy, const hotmoe_admission & admission);

    // Have experts in host memory: at most n_slots of them. data[k * n_tensors + t] points to tensor t of experts[k], until the
    // next call. false: error says why; what was resident before still is.
    bool fetch(expert_stream & stream, const int32_t * experts, int32_t n, const hotmoe_event & event, std::vector<const void *> & data, std::string & error);

    void     clear() { map.clear(); }
    int32_t  n_slots() const { return map.n_slots(); }
    uint64_t bytes() const { return buffer ? ggml_backend_buffer_get_size(buffer.get()) : 0; }

    uint64_t hits      = 0;
    uint64_t misses    = 0;
    uint64_t evictions = 0;

  private:
    host_slots(int32_t n_expert, int32_t n_slots, const hotmoe_policy & policy, const hotmoe_admission & admission)
        : map(n_expert, n_slots, policy, admission) {}

    void * at(int32_t tensor, int32_t slot) const { return bases[tensor] + slot * strides[tensor]; }

    slot_map                map;
    ggml_backend_buffer_ptr buffer;
    std::vector<char *>     bases;   // per tensor: slot 0
    std::vector<size_t>     strides; // per tensor: bytes from slot to slot
    slot_event_result       result;
};
