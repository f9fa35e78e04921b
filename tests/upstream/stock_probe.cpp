// Runs one model in one placement and prints, per ubatch size, a digest of everything that must be the same in the patched
// and in the unpatched library when no cache is attached: nodes, their backends and splits, and all logits.
//
//     stock-probe MODEL PLACEMENT DUMP
//
//     MODEL      GGUF file
//     PLACEMENT  cpu       no device; the CPU may repack weights
//                device    everything on SIM0
//                cpu-moe   all layers on SIM0, experts in host memory, not repacked
//                detached  as cpu-moe, but a cache was attached, used and freed before (patched library only)
//                attached  as cpu-moe, with a cache (patched library only): its graphs must not be those of stock
//     DUMP       file that receives the text behind the digests, "-" for none
//
// Two sources tell about a graph. The scheduler's own listing (GGML_SCHED_DEBUG) has every node with its backend and every
// split with its inputs; it leaves out views. An eval callback sees views too, with shapes, strides and parameters.

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#include "hotmoe/sim.h"

#ifdef HOTMOE_PATCHED
#    include "hotmoe/cache.h"
#endif

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

static const int      N_TOKENS   = 80;
static const uint32_t UBATCHES[] = { 1, 8, 40 }; // 40: above the size from which ops on host weights move to a device

static void fail(const char * what) {
    fprintf(stderr, "stock-probe: %s\n", what);
    exit(1);
}

struct digest {
    uint64_t value = 14695981039346656037ull; // FNV-1a

    void add(const void * data, size_t size) {
        for (size_t i = 0; i < size; i++) {
            value = (value ^ ((const uint8_t *) data)[i]) * 1099511628211ull;
        }
    }
    void add(const std::string & text) { add(text.data(), text.size()); }
};

//
// the scheduler's listing
//

struct listing {
    std::string all;         // of every graph since the last reset
    std::string last;        // of the graph listed last
    int         n_graphs = 0;
    bool        keep     = false;

    void add(const char * text) {
        const bool split = strncmp(text, "\n## SPLIT #", 11) == 0;
        const bool node  = strncmp(text, "node #", 6) == 0;
        if (strncmp(text, "\n## SPLIT #0:", 13) == 0) {
            last.clear();
            n_graphs++;
        }
        keep = keep || split || node;
        if (keep) {
            all  += text;
            last += text;
            // a line of the listing comes in several pieces
            keep = text[strlen(text) - 1] != '\n';
        }
    }

    int count(const char * what) const {
        int n = 0;
        for (size_t at = last.find(what); at != std::string::npos; at = last.find(what, at + 1)) {
            n++;
        }
        return n;
    }
};

static listing sched;

static void log_callback(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
    if (*text) {
        sched.add(text);
    }
}

//
// the eval callback's listing
//

static bool describe_node(struct ggml_tensor * t, bool ask, void * user_data) {
    if (ask) {
        std::string & out = *(std::string *) user_data;
        char line[256];
        snprintf(line, sizeof(line), "%s %s %s [%lld %lld %lld %lld] [%zu %zu %zu %zu]", ggml_op_desc(t), t->name, ggml_type_name(t->type),
                 (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3], t->nb[0], t->nb[1], t->nb[2], t->nb[3]);
        out += line;
        for (size_t i = 0; i < GGML_MAX_OP_PARAMS / sizeof(int32_t); i++) {
            out += " " + std::to_string(t->op_params[i]);
        }
        for (int j = 0; j < GGML_MAX_SRC && t->src[j]; j++) {
            out += std::string(" <") + t->src[j]->name + ">";
        }
        out += "\n";
    }
    return !ask; // no data is wanted, so the graph is computed in one piece
}

//
// runs
//

static llama_context * new_context(llama_model * model, uint32_t n_ubatch, std::string * nodes) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx           = 256;
    params.n_batch         = n_ubatch;
    params.n_ubatch        = n_ubatch;
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    if (nodes) {
        params.cb_eval           = describe_node;
        params.cb_eval_user_data = nodes;
    }
    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fail("could not create a context");
    }
    return ctx;
}

// Decodes all tokens in ubatches of n_ubatch, and digests all logits.
static uint64_t decode(llama_model * model, llama_context * ctx, uint32_t n_ubatch, const std::vector<llama_token> & tokens) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    digest d;
    double   sum   = 0.0;
    llama_memory_clear(llama_get_memory(ctx), true);
    llama_batch batch = llama_batch_init(n_ubatch, 0, 1);
    for (size_t start = 0; start < tokens.size(); start += n_ubatch) {
        batch.n_tokens = 0;
        for (size_t i = start; i < tokens.size() && i < start + n_ubatch; i++) {
            const int k = batch.n_tokens++;
            batch.token[k]     = tokens[i];
            batch.pos[k]       = (llama_pos) i;
            batch.n_seq_id[k]  = 1;
            batch.seq_id[k][0] = 0;
            batch.logits[k]    = 1;
        }
        if (llama_decode(ctx, batch) != 0) {
            fail("llama_decode failed");
        }
        for (int i = 0; i < batch.n_tokens; i++) {
            const float * logits = llama_get_logits_ith(ctx, i);
            d.add(logits, n_vocab * sizeof(float));
            sum += std::fabs(logits[0]);
        }
    }
    llama_batch_free(batch);
    if (!std::isfinite(sum) || sum == 0.0) {
        fail("the logits are not finite, or all zero");
    }
    return d.value;
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fail("usage: stock-probe MODEL cpu|device|cpu-moe|detached|attached DUMP");
    }
    const std::string placement = argv[2];
    const bool attached = placement == "attached";
    const bool detached = placement == "detached";
    const bool cpu_moe  = placement == "cpu-moe" || attached || detached;
    const bool on_sim   = placement == "device" || cpu_moe;
    if (!on_sim && placement != "cpu") {
        fail("unknown placement");
    }
    FILE * dump = strcmp(argv[3], "-") == 0 ? nullptr : fopen(argv[3], "w");

    setenv("GGML_SCHED_DEBUG", "2", 1);
    llama_log_set(log_callback, nullptr);
    if (hotmoe_sim_register() != HOTMOE_SIM_OK) {
        fail(hotmoe_sim_last_error());
    }

    ggml_backend_dev_t devices[2] = { on_sim ? ggml_backend_dev_by_name("SIM0") : nullptr, nullptr };
    if (on_sim && !devices[0]) {
        fail("there is no device SIM0");
    }
    const llama_model_tensor_buft_override overrides[] = {
        { "\\.ffn_(up|down|gate|gate_up)_(ch|)exps", ggml_backend_cpu_buffer_type() },
        { nullptr, nullptr },
    };
    llama_model_params params = llama_model_default_params();
    params.devices         = devices;
    params.n_gpu_layers    = 999;
    params.use_extra_bufts = !cpu_moe;
    if (cpu_moe) {
        params.tensor_buft_overrides = overrides;
    }
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) {
        fail("could not load the model");
    }

    std::mt19937 gen(1);
    std::uniform_int_distribution<int> dis(3, llama_vocab_n_tokens(llama_model_get_vocab(model)) - 1);
    std::vector<llama_token> tokens;
    for (int i = 0; i < N_TOKENS; i++) {
        tokens.push_back(dis(gen));
    }

    for (const uint32_t n_ubatch : UBATCHES) {
        uint64_t pool_events = 0;
        sched = {};
        llama_context * ctx = new_context(model, n_ubatch, nullptr);
#ifdef HOTMOE_PATCHED
        hotmoe_cache * cache = nullptr;
        if (attached || detached) {
            hotmoe_cache_params cache_params = {};
            cache_params.slots  = "40";
            cache_params.strict = 1;
            if (hotmoe_cache_attach(ctx, &cache_params, &cache) != HOTMOE_OK) {
                fail(hotmoe_last_error());
            }
            decode(model, ctx, n_ubatch, tokens);
            hotmoe_counters counters = {};
            hotmoe_cache_stats(cache, -1, -1, &counters);
            pool_events = counters.events;
            if (detached) {
                hotmoe_cache_free(cache);
                cache = nullptr;
            }
            sched = {};
        }
#else
        if (attached || detached) {
            fail("this library knows no cache");
        }
#endif
        const uint64_t logits = decode(model, ctx, n_ubatch, tokens);
        llama_free(ctx);
#ifdef HOTMOE_PATCHED
        hotmoe_cache_free(cache);
#endif
        const listing graphs = sched;

        std::string nodes;
        ctx = new_context(model, n_ubatch, &nodes);
        decode(model, ctx, n_ubatch, tokens);
        llama_free(ctx);

        hotmoe_sim_counters counters = {};
        counters.struct_size = sizeof(counters);
        hotmoe_sim_get_counters(0, &counters);

        digest all, last, shapes;
        all.add(graphs.all);
        last.add(graphs.last);
        shapes.add(nodes);
        printf("{\"ubatch\": %u, \"graphs\": %d, \"nodes\": %d, \"splits\": %d, \"kernels\": %llu, \"pool_events\": %llu, "
               "\"all_graphs\": \"%016llx\", \"last_graph\": \"%016llx\", \"shapes\": \"%016llx\", \"logits\": \"%016llx\"}\n",
               n_ubatch, graphs.n_graphs, graphs.count("node #"), graphs.count("## SPLIT #"), (unsigned long long) counters.n_kernels,
               (unsigned long long) pool_events, (unsigned long long) all.value, (unsigned long long) last.value,
               (unsigned long long) shapes.value, (unsigned long long) logits);
        if (dump) {
            fprintf(dump, "==== ubatch %u: scheduler\n%s\n==== ubatch %u: nodes\n%s\n", n_ubatch, graphs.all.c_str(), n_ubatch, nodes.c_str());
        }
    }
    llama_model_free(model);
    if (dump) {
        fclose(dump);
    }
    return 0;
}
