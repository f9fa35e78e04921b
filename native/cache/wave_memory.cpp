#include "wave_memory.h"

static constexpr size_t ALIGN = 4096;

static size_t padded(size_t size) {
    return (size + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t result_bytes(int64_t n_embd, int64_t n_pairs) {
    return (size_t) n_embd * (n_pairs + 1) * sizeof(float);
}

uint64_t wave_memory::bytes(int64_t n_embd, int64_t max_pairs) {
    return padded(max_pairs * sizeof(int32_t)) + padded(max_pairs * sizeof(int64_t)) + padded(result_bytes(n_embd, max_pairs));
}

bool wave_memory::allocate(ggml_backend_dev_t dev, int64_t n_embd, int64_t max_pairs) {
    ids_offset     = 0;
    rows_offset    = ids_offset + padded(max_pairs * sizeof(int32_t));
    results_offset = rows_offset + padded(max_pairs * sizeof(int64_t));
    end            = results_offset + padded(result_bytes(n_embd, max_pairs));
    buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), end));
    if (!buffer) {
        return false;
    }
    // marked as weights, so that the scheduler runs the ops that use them where they are
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(buffer.get(), 0);
    return true;
}

ggml_tensor * wave_memory::at(ggml_tensor * t, size_t offset, size_t room) const {
    if (!buffer || ggml_nbytes(t) > room) {
        return nullptr;
    }
    char * base = (char *) ggml_backend_buffer_get_base(buffer.get());
    return ggml_backend_tensor_alloc(buffer.get(), t, base + offset) == GGML_STATUS_SUCCESS ? t : nullptr;
}

ggml_tensor * wave_memory::ids(ggml_context * ctx, int64_t n_used, int64_t n_tokens) const {
    return at(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_tokens), ids_offset, rows_offset - ids_offset);
}

ggml_tensor * wave_memory::rows(ggml_context * ctx, int64_t n_pairs) const {
    return at(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_pairs), rows_offset, results_offset - rows_offset);
}

ggml_tensor * wave_memory::results(ggml_context * ctx, int64_t n_embd, int64_t n_pairs) const {
    return at(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_pairs + 1), results_offset, end - results_offset);
}
