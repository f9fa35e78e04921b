// Placement of expert weights at load, by what they are and not by patterns over names.

#include "cache/error.h"

#include "hotmoe/cache.h"

#include "llama-expert.h"

static thread_local hotmoe_load_options       load_options;
static thread_local llama_expert_loader_hooks loader_hooks;

static ggml_backend_buffer_type_t select_buft(void * user_data, const ggml_tensor * meta, int il, ggml_backend_buffer_type_t buft) {
    const hotmoe_load_options & options = *(const hotmoe_load_options *) user_data;
    (void) meta;

    const bool asked = options.n_cpu_moe == HOTMOE_ALL_LAYERS || il < options.n_cpu_moe;

    ggml_backend_dev_t dev     = ggml_backend_buft_get_device(buft);
    const bool         on_host = ggml_backend_buft_is_host(buft) || !dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;

    // the plain CPU type: it can be mapped from the file, and keeps the file's layout
    return asked || on_host ? ggml_backend_cpu_buffer_type() : buft;
}

int32_t hotmoe_load_begin(const hotmoe_load_options * options) {
    if (!options || options->n_cpu_moe < HOTMOE_ALL_LAYERS) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "load options: n_cpu_moe is %d; it must be a number of layers, or %d for all",
                           options ? options->n_cpu_moe : 0, HOTMOE_ALL_LAYERS);
    }
    load_options             = *options;
    loader_hooks.user_data   = &load_options;
    loader_hooks.select_buft = select_buft;
    llama_expert_set_loader_hooks(&loader_hooks);
    return HOTMOE_OK;
}

void hotmoe_load_end(void) {
    llama_expert_set_loader_hooks(nullptr);
}
