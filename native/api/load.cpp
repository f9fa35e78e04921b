// Placement of expert weights at load, by what they are and not by patterns over names.

#include "cache/error.h"

#include "store/stream_buffer.h"

#include "hotmoe/cache.h"

#include "llama-expert.h"

#include "ggml-impl.h"

static thread_local hotmoe_load_options       load_options;
static thread_local llama_expert_loader_hooks loader_hooks;
static thread_local uint64_t                  pinned_so_far; // bytes asked for

static ggml_backend_buffer_type_t select_buft(void * user_data, const ggml_tensor * meta, int il, ggml_backend_buffer_type_t buft) {
    const hotmoe_load_options & options = *(const hotmoe_load_options *) user_data;
    const bool                  asked   = options.n_cpu_moe == HOTMOE_ALL_LAYERS || il < options.n_cpu_moe;

    ggml_backend_dev_t dev     = ggml_backend_buft_get_device(buft);
    const bool         on_host = ggml_backend_buft_is_host(buft) || !dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;

    if (!asked && !on_host) {
        return buft;
    }
    if (options.store == HOTMOE_STORE_RESIDENT) {
        // of the device that runs the layer; the CPU's layers have nothing to upload
        ggml_backend_buffer_type_t pinned = dev && !on_host ? ggml_backend_dev_host_buffer_type(dev) : nullptr;
        const uint64_t             size   = ggml_nbytes(meta);
        if (pinned && (options.pinned_bytes == 0 || pinned_so_far + size <= options.pinned_bytes)) {
            pinned_so_far += size;
            return pinned;
        }
    }
    // the plain CPU type: it can be mapped from the file, and keeps the file's layout
    return options.store == HOTMOE_STORE_STREAM ? stream_buffer_type() : ggml_backend_cpu_buffer_type();
}

static llama_expert_load load(void * user_data, const ggml_tensor * tensor, const char * path, size_t offset, size_t size) {
    (void) user_data;
    streamed_experts * experts = streamed_experts_of(tensor);
    if (!experts) {
        return LLAMA_EXPERT_LOAD_USUAL;
    }
    if (!*path) {
        GGML_LOG_ERROR("hotmoe: the model does not come from a file with a name, so its experts cannot be streamed: load it from a path\n");
        return LLAMA_EXPERT_LOAD_FAILED;
    }
    experts->add(tensor, path, offset, size);
    return LLAMA_EXPERT_LOAD_TAKEN;
}

int32_t hotmoe_load_begin(const hotmoe_load_options * options) {
    if (!options || options->n_cpu_moe < HOTMOE_ALL_LAYERS) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "load options: n_cpu_moe is %d; it must be a number of layers, or %d for all",
                           options ? options->n_cpu_moe : 0, HOTMOE_ALL_LAYERS);
    }
    if (options->store < HOTMOE_STORE_MAPPED || options->store > HOTMOE_STORE_RESIDENT) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "load options: store is %d, which is none", options->store);
    }
    pinned_so_far            = 0;
    load_options             = *options;
    loader_hooks.user_data   = &load_options;
    loader_hooks.select_buft = select_buft;
    loader_hooks.load        = load;
    llama_expert_set_loader_hooks(&loader_hooks);
    return HOTMOE_OK;
}

void hotmoe_load_end(void) {
    llama_expert_set_loader_hooks(nullptr);
}
