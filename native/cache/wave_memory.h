#pragma once

// What the waves of a device share: where a ubatch that needs more experts than there are slots collects its results.
//
// Each pair of a token and one of its experts is computed in one wave, and its row copied to a place of its own; rows of
// pairs that are not of the wave go to a place that nobody reads. One layer at a time uses it.

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cstdint>

class wave_memory {
  public:
    static uint64_t bytes(int64_t n_embd, int64_t max_pairs);

    // false: the device refused.
    bool allocate(ggml_backend_dev_t dev, int64_t n_embd, int64_t max_pairs);

    // Tensors of a graph that is being built, at the addresses of the shared memory. NULL if they are larger than it.
    ggml_tensor * ids(ggml_context * ctx, int64_t n_used, int64_t n_tokens) const;   // i32 [n_used, n_tokens]: slot of each pair
    ggml_tensor * rows(ggml_context * ctx, int64_t n_pairs) const;                   // i64 [n_pairs]: its place in the results
    ggml_tensor * results(ggml_context * ctx, int64_t n_embd, int64_t n_pairs) const; // f32 [n_embd, n_pairs + 1]

    ggml_backend_buffer_t get() const { return buffer.get(); }

  private:
    ggml_tensor * at(ggml_tensor * t, size_t offset, size_t room) const;

    ggml_backend_buffer_ptr buffer;
    size_t                  ids_offset     = 0;
    size_t                  rows_offset    = 0;
    size_t                  results_offset = 0;
    size_t                  end            = 0;
};
