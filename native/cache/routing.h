#pragma once

// The routing of one (ubatch, layer), read back from where the model's graph computed it.

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

struct routing {
    std::vector<int32_t> ids;     // [n_tokens * n_used]
    std::vector<float>   weights; // as ids; empty if they were not asked for, or cannot be read

    // Queue the read-back on `backend`, where both were computed. `w` may be NULL. false: `error` says why. What was read is
    // there once the backend was waited for.
    bool read(const ggml_tensor * src, const ggml_tensor * w, ggml_backend_t backend, std::string & error) {
        if (src->type != GGML_TYPE_I32 || !ggml_is_contiguous(src)) {
            error = "the expert ids are not contiguous 32-bit integers";
            return false;
        }
        ids.resize(ggml_nelements(src));
        ggml_backend_tensor_get_async(backend, src, ids.data(), 0, ids.size() * sizeof(int32_t));

        const bool readable = w && w->type == GGML_TYPE_F32 && ggml_is_contiguous(w) && (size_t) ggml_nelements(w) == ids.size() && w->buffer &&
            ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(w->buffer));
        weights.resize(readable ? ids.size() : 0);
        if (readable) {
            ggml_backend_tensor_get_async(backend, w, weights.data(), 0, weights.size() * sizeof(float));
        }
        return true;
    }

    const float * weights_or_null() const { return weights.empty() ? nullptr : weights.data(); }
};
