#pragma once

// The memory of expert tensors that are streamed: none.
//
// A buffer type whose buffers reserve addresses that nobody may touch, so that llama.cpp can lay out its tensors, and remember
// for each tensor which bytes of which file it stands for. Buffers report host memory: the scheduler then plans as for experts
// in RAM, and the cache's hooks replace every use. It lives as long as the model.

#include "store/reader.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

struct file_range {
    std::string path;
    uint64_t    offset = 0; // bytes
    uint64_t    size   = 0; // bytes
};

// What one buffer stands for.
class streamed_experts {
  public:
    // Remember where a tensor's bytes are.
    void add(const ggml_tensor * tensor, const char * path, uint64_t offset, uint64_t size);

    // NULL if it was not added.
    const file_range * find(const ggml_tensor * tensor) const;

    // Readers for contexts over this model, which share them: made by the first that asks, with what it asks for, and
    // freed with the last that holds them. NULL: error says why.
    std::shared_ptr<reader_pool> readers(int32_t n_threads, store_direct direct, std::string & error);

  private:
    mutable std::mutex                                  mutex;
    std::unordered_map<const ggml_tensor *, file_range> ranges;
    std::weak_ptr<reader_pool>                          shared;
};

ggml_backend_buffer_type_t stream_buffer_type();

// What the tensor's buffer stands for; NULL if it is an ordinary one.
streamed_experts * streamed_experts_of(const ggml_tensor * tensor);
