// What the model, its context and its cache take of host memory.

#include "expert_cache.h"

#include "store/stream_buffer.h"

#include "ggml-cpu.h"
#include "llama-ext.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>

bool computes_from_host_memory(ggml_backend_dev_t dev) {
    const enum ggml_backend_dev_type type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_CPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

// Pinned memory and what the CPU has repacked included.
static bool lies_in_host_memory(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return ggml_backend_buft_is_host(buft) || (dev && computes_from_host_memory(dev));
}

// What buffers over a mapped file have. Nothing else uses it in llama.cpp.
static ggml_backend_buffer_type_t mapped_buffer_type() {
    alignas(64) static char nothing[64];
    ggml_backend_buffer_ptr buffer(ggml_backend_cpu_buffer_from_ptr(nothing, sizeof(nothing)));
    return ggml_backend_buffer_get_type(buffer.get());
}

uint64_t taken_compute_bytes(const llama_context * ctx) {
    uint64_t taken = 0;
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx)) {
        taken += lies_in_host_memory(buft) && buft != ggml_backend_cpu_buffer_type() ? bytes.compute : 0;
    }
    return taken;
}

static bool is_of_cpu(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return ggml_backend_buft_is_host(buft) || (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU);
}

// The number after the last "-" of a node's name, -1 if there is none.
static int layer_of(const ggml_tensor * node) {
    const char * dash = std::strrchr(node->name, '-');
    return dash && std::isdigit((unsigned char) dash[1]) ? std::atoi(dash + 1) : -1;
}

// What the CPU's kernels work in beside the buffers of the graphs, in the largest ubatch of a full context. A node runs on the CPU
// if a source that has its place already is there, else if its layer does; nodes without a layer go with those before them.
static uint64_t work_bytes(llama_context * ctx) {
    std::map<int, bool> on_cpu; // layers
    llama_expert_for_each_tensor(
        llama_get_model(ctx), [](void * ud, const char *, ggml_tensor *, const llama_expert_layer * layer) {
            (*(std::map<int, bool> *) ud)[layer->il] = ggml_backend_dev_type(layer->dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
        },
        &on_cpu);

    const uint32_t n_seqs   = llama_n_seq_max(ctx);
    const uint32_t n_tokens = std::max(n_seqs, std::min(llama_n_ctx(ctx), llama_n_ubatch(ctx)));
    llama_synchronize(ctx);
    ggml_cgraph * graph = llama_graph_reserve(ctx, n_tokens, n_seqs, n_seqs);
    if (!graph) {
        return 0;
    }
    const int        n_nodes = ggml_graph_n_nodes(graph);
    ggml_init_params params  = { ggml_graph_overhead_custom(n_nodes, false), nullptr, true };
    ggml_context_ptr of_cpu(ggml_init(params));
    ggml_cgraph *    part = ggml_new_graph_custom(of_cpu.get(), n_nodes, false);
    bool             here = true;
    for (int i = 0; i < n_nodes; i++) {
        ggml_tensor * node  = ggml_graph_node(graph, i);
        const auto    layer = on_cpu.find(layer_of(node));
        here                = layer == on_cpu.end() ? here : layer->second;
        bool runs_here      = here;
        for (const ggml_tensor * src : node->src) {
            const ggml_tensor * t = src && src->view_src ? src->view_src : src;
            if (t && t->buffer) {
                runs_here = is_of_cpu(ggml_backend_buffer_get_type(t->buffer));
                break;
            }
        }
        if (runs_here) {
            ggml_graph_add_node(part, node);
        }
    }
    const uint64_t bytes = ggml_graph_plan(part, std::max(llama_n_threads(ctx), llama_n_threads_batch(ctx)), nullptr).work_size;
    llama_graph_reserve(ctx, n_seqs, n_seqs, n_seqs); // a plan that decoding can use
    return bytes;
}

hotmoe_plan_host hotmoe_cache_impl::host_needs(llama_context * ctx) const {
    const ggml_backend_buffer_type_t mapped = mapped_buffer_type();
    hotmoe_plan_host                 h      = {};
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx)) {
        if (!lies_in_host_memory(buft)) {
            continue;
        }
        if (buft == mapped) {
            h.mapped_bytes += bytes.model;
        } else if (buft != stream_buffer_type()) { // that one reserves addresses only
            h.weight_bytes += bytes.model;
        }
        h.context_bytes += bytes.context;
        h.compute_bytes += bytes.compute;
    }
    h.context_bytes += (uint64_t) llama_n_seq_max(ctx) * llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))) * sizeof(float);
    h.compute_bytes += work_bytes(ctx);

    for (const auto & [dev, n] : wave_needs(ctx)) {
        h.wave_bytes += computes_from_host_memory(dev) ? wave_memory::bytes(n.n_embd, n.n_pairs) : 0;
    }
    const reader_pool * readers = nullptr;
    uint64_t            largest = 0;
    for (size_t i = 0; i < pools.size(); i++) {
        if (!pools[i]) {
            continue;
        }
        h.slot_bytes += plan_banks[i].host_bytes + (computes_from_host_memory(pools[i]->dev) ? plan_banks[i].pool_bytes : 0);
        if (pools[i]->stream) {
            readers = &pools[i]->stream->pool(); // shared by all
            largest = std::max(largest, pools[i]->stream->largest_read());
        }
    }
    h.reader_bytes = readers ? readers->buffer_bytes(largest) : 0;
    h.total_bytes  = h.slot_bytes + h.weight_bytes + h.context_bytes + h.compute_bytes + h.wave_bytes + h.reader_bytes;

    for (const hotmoe_plan_device & d : plan_devices) {
        if (std::strcmp(d.device, HOST_SLOTS) == 0) {
            h.headroom_bytes = d.headroom_bytes;
        }
    }
    return h;
}
