#include "wave_memory.h"

static constexpr size_t ALIGN = 4096;

static size_t padded(size_t size) {
    return (size + ALIGN - 1) / ALIGN * ALIGN;
}

wave_memory::layout wave_memory::lay_out(int64_t n_embd, int64_t max_pairs) {
    layout o  = {};
    o.sources = 0;
    o.experts = o.sources + padded(max_pairs * sizeof(int32_t));
    o.slots   = o.experts + padded(max_pairs * sizeof(int32_t));
    o.rows    = o.slots + padded(max_pairs * sizeof(int32_t));
    o.results = o.rows + padded(max_pairs * sizeof(int64_t));
    o.end     = o.results + padded((size_t) n_embd * (max_pairs + 1) * sizeof(float));
    return o;
}

uint64_t wave_memory::bytes(int64_t n_embd, int64_t max_pairs) {
    return lay_out(n_embd, max_pairs).end;
}

bool wave_memory::allocate(ggml_backend_dev_t dev, int64_t n_embd, int64_t max_pairs) {
    offsets = lay_out(n_embd, max_pairs);
    buffer.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), offsets.end));
    if (!buffer) {
        return false;
    }
    // marked as weights, so that the scheduler runs the ops that use them where they are
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(buffer.get(), 0);
    return true;
}

ggml_tensor * wave_memory::at(ggml_tensor * t, size_t offset, size_t end) const {
    if (!buffer || ggml_nbytes(t) > end - offset) {
        return nullptr;
    }
    char * base = (char *) ggml_backend_buffer_get_base(buffer.get());
    return ggml_backend_tensor_alloc(buffer.get(), t, base + offset) == GGML_STATUS_SUCCESS ? t : nullptr;
}

bool wave_memory::tensors(ggml_context * ctx, int64_t n_embd, int64_t n_pairs, int64_t n, wave_tensors & out) const {
    out.sources = at(ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n), offsets.sources, offsets.experts);
    out.experts = at(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n), offsets.experts, offsets.slots);
    out.slots   = at(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n), offsets.slots, offsets.rows);
    out.rows    = at(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n), offsets.rows, offsets.results);
    out.results = at(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_pairs + 1), offsets.results, offsets.end);
    return out.sources && out.experts && out.slots && out.rows && out.results;
}
