#pragma once

// Tier 2 of one bank whose experts are streamed to a device: slots in host memory, filled from files.
//
// What the device misses is looked up here first. An expert that the device has needs no copy here, but one that was read for
// it stays until its slot is needed: the tiers are neither exclusive nor inclusive. The policy is told of the lookups, and, as of
// a use, of an expert that loses its slot on the device while its copy is still here. See bench/host_tier.md.

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

    // At most, besides the experts.
    static uint64_t fixed_bytes(size_t n_tensors);

    // Have experts in host memory: at most n_slots of them; weights[n] are their router weights, or NULL. data[k * n_tensors + t]
    // points to tensor t of experts[k], until done(). has_room_for(n) must hold. false: error says why; what was resident before still is.
    bool fetch(expert_stream & stream, const int32_t * experts, const float * weights, int32_t n, const hotmoe_event & event,
               std::vector<const void *> & data, std::string & error);

    // Experts lost their slots on the device: copies that are still here count as used.
    void released(const std::vector<int32_t> & experts, const hotmoe_event & event);

    // What fetch gave is in use, and its slots are not filled anew, until done() says that it was copied.
    bool has_room_for(int32_t n) const { return (int32_t) in_use.size() + n <= map.n_slots(); }
    void done();

    void     clear();
    bool     wants_weights() const { return map.wants_weights(); }
    int32_t  n_slots() const { return map.n_slots(); }
    uint64_t bytes() const { return buffer ? ggml_backend_buffer_get_size(buffer.get()) : 0; }

    struct counters {
        uint64_t hits             = 0; // of lookups
        uint64_t misses           = 0;
        uint64_t evictions        = 0;
        uint64_t not_admitted     = 0; // lookups that found or got a slot on loan
        uint64_t policy_fallbacks = 0; // times that an answer of the policy or the admission was refused
    } count;

  private:
    host_slots(int32_t n_expert, int32_t n_slots, const hotmoe_policy & policy, const hotmoe_admission & admission)
        : map(n_expert, n_slots, policy, admission) {}

    void * at(int32_t tensor, int32_t slot) const { return bases[tensor] + slot * strides[tensor]; }

    slot_map                map;
    ggml_backend_buffer_ptr buffer;
    std::vector<char *>     bases;   // per tensor: slot 0
    std::vector<size_t>     strides; // per tensor: bytes from slot to slot
    slot_event_result       result;
    std::vector<int32_t>    in_use; // pinned
    std::vector<int32_t>    here; // scratch
};
