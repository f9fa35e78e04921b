#pragma once

// What the waves of a device share: which pairs of a token and one of its experts a wave computes, and where the results of all
// waves are collected. Each pair is computed in one wave, and its row copied to a place of its own. A wave has room for a fixed
// number of pairs; what is left over computes nothing of use, and its rows go to a place that nobody reads. One layer at a time
// uses the memory.

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>

// Tensors of a graph that is being built, at the addresses of the shared memory; n is the room for pairs in a wave.
struct wave_tensors {
    ggml_tensor * sources = nullptr; // i32 [n]: row of the input
    ggml_tensor * experts = nullptr; // i32 [1, n]
    ggml_tensor * slots   = nullptr; // i32 [1, n]: where the expert is
    ggml_tensor * rows    = nullptr; // i64 [n]: place in the results
    ggml_tensor * results = nullptr; // f32 [n_embd, n_pairs + 1], all pairs of the event
};

class wave_memory {
  public:
    static uint64_t bytes(int64_t n_embd, int64_t max_pairs);

    // false: the device refused.
    bool allocate(ggml_backend_dev_t dev, int64_t n_embd, int64_t max_pairs);

    // false: they are larger than the memory.
    bool tensors(ggml_context * ctx, int64_t n_embd, int64_t n_pairs, int64_t n, wave_tensors & out) const;

    ggml_backend_buffer_t get() const { return buffer.get(); }

  private:
    struct layout {
        size_t sources, experts, slots, rows, results, end; // offsets in bytes
    };
    static layout lay_out(int64_t n_embd, int64_t max_pairs);

    ggml_tensor * at(ggml_tensor * t, size_t offset, size_t end) const;

    ggml_backend_buffer_ptr buffer;
    layout                  offsets = {};
};
