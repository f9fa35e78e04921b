#pragma once

// The cache of one context: finds the banks of the model, plans and allocates their pools, and answers llama.cpp's hooks.

#include "cache/plan.h"
#include "cache/pool.h"
#include "cache/trace.h"
#include "tier/host_tier.h"

#include "hotmoe/cache.h"

#include "llama-expert.h"

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

constexpr const char * HOST_SLOTS = "host slots"; // a row of the plan's devices

// Whether a device's memory is the host's.
bool computes_from_host_memory(ggml_backend_dev_t dev);

// Of the buffers for graphs, bytes of host memory that the system has given already: pinned memory is, from the start.
uint64_t taken_compute_bytes(const llama_context * ctx);

class hotmoe_cache_impl {
  public:
    hotmoe_cache_impl() = default;
    ~hotmoe_cache_impl();

    hotmoe_cache_impl(const hotmoe_cache_impl &)             = delete;
    hotmoe_cache_impl & operator=(const hotmoe_cache_impl &) = delete;

    int32_t               attach(llama_context * ctx, const hotmoe_cache_params & params);
    void                  clear();
    void                  reset_stats();
    void                  set_fault(int32_t fault);
    hotmoe_store_counters store_stats() const;
    std::string           store_warning() const;
    void                  synchronize() const; // waits for the context, if it lives

    // Pool of bank i of the plan, or NULL if it was left out.
    expert_pool * pool(int32_t i) const { return i >= 0 && i < (int32_t) pools.size() ? pools[i].get() : nullptr; }

    // Whether streamed experts have host slots behind a device's slots.
    bool has_tier2() const;

    std::string                     policy;
    std::string                     admission;
    std::string                     host_policy; // of tier 2
    std::string                     host_admission;
    std::string                     tier_manager; // "": none
    std::unique_ptr<host_tier>      tier;  // NULL without a tier manager
    std::unique_ptr<trace_buffer>   trace; // NULL: nothing is recorded
    std::string                     take_store_error(); // of the evaluation that failed; "": it was something else
    std::vector<hotmoe_plan_bank>   plan_banks;
    std::vector<hotmoe_plan_device> plan_devices;
    hotmoe_plan_host                plan_host                 = {};
    hotmoe_step_counters            steps[HOTMOE_PHASE_COUNT] = {};

  private:
    void    set_hooks();
    int32_t find_banks(const llama_model * model, bool no_pools);
    int32_t size_pools(const std::vector<size_request> & requests, int32_t attempt); // "auto" asks for less at each attempt
    int32_t size_device(ggml_backend_dev_t dev, const size_request & request, const struct device_memory & memory);
    int32_t size_host_slots(llama_context * ctx, int32_t attempt);
    int32_t size_banks(const std::vector<size_t> & index, const size_request & request, const struct device_memory & memory);
    int32_t open_streams(const hotmoe_cache_params & params);
    int32_t allocate_waves(const llama_context * ctx);

    struct wave_need {
        int64_t n_embd  = 0;
        int64_t n_pairs = 0; // of a token and one of its experts, in one ubatch
    };
    std::map<ggml_backend_dev_t, wave_need> wave_needs(const llama_context * ctx) const;
    hotmoe_plan_host                        host_needs(llama_context * ctx) const;

    void    leave_out(ggml_backend_dev_t dev, const char * reason);
    int32_t check_strict() const;
    int32_t check_tier2(const hotmoe_cache_params & params) const;
    int32_t make_tier(const char * host_slots);
    int32_t create_policies(const std::string & policy, const std::string & admission, const hotmoe_policy_config & config, hotmoe_policy & ranks,
                            hotmoe_admission & judges);
    int32_t allocate_pools();
    int32_t allocate_tier2(expert_pool & pool, hotmoe_plan_bank & b);
    int32_t attach_hooks(llama_context * ctx);
    void    log_plan(uint32_t n_seq_max) const;

    // llama.cpp's hooks
    void          graph_begin(const void * graph, llama_expert_bypass bypass);
    void          router(ggml_tensor * ids, ggml_tensor * weights);
    ggml_tensor * remap(ggml_context * ctx, ggml_tensor * w, ggml_tensor ** ids);
    void          route(ggml_context * ctx, ggml_tensor * w, ggml_tensor ** input, ggml_tensor ** ids);
    ggml_tensor * merge(ggml_context * ctx, ggml_tensor * experts);
    ggml_tensor * slot_ids_of(ggml_context * ctx, const expert_pool & pool, int32_t bank, ggml_tensor * ids);
    ggml_tensor * observed_ids_of(ggml_context * ctx, int32_t bank, ggml_tensor * ids);
    bool          observes() const { return trace || tier; } // wants the routing of banks on the stock path, too
    ggml_status   observe(int32_t bank, const ggml_tensor * src, ggml_backend_t backend);
    void          tell(const routing & r, int32_t n_used);
    void          ubatch_begin(const void * graph, uint32_t n_tokens, uint32_t n_seqs);
    uint32_t      max_tokens(uint32_t n_ubatch) const;
    void          context_free();
    bool          anchor_match(const ggml_tensor * node) const;
    bool          owns(const ggml_tensor * weight) const;
    ggml_status   anchor_run(const ggml_tensor * node, const ggml_tensor * src, ggml_backend_t src_backend, ggml_backend_t backend, bool * again);
    ggml_status   run_pool(int32_t bank, const ggml_tensor * src, ggml_backend_t src_backend, ggml_backend_t backend);
    void          fail(expert_pool & pool);
    void          end_event(expert_pool & pool);
    bool          streams() const;

    // The routing of one bank in a graph.
    struct graph_bank {
        ggml_tensor * weights = nullptr; // of the router; NULL if nobody wants them
        int32_t       n_used  = 0;       // experts per token
        wave_tensors  wave;              // in waves: what one computes; else NULLs
        bool          by_pair = false;   // ... the input has a row for each pair
        bool          merged  = false;   // ... the graph collects what they give
    };

    // What was decided while a graph was built; a graph is computed many times.
    struct graph_info {
        bool                    fresh  = true; // not computed yet
        llama_expert_bypass     bypass = LLAMA_EXPERT_BYPASS_NONE;
        std::vector<int32_t>    bypassed[HOTMOE_BYPASS_COUNT]; // banks that take the stock path in it
        std::vector<graph_bank> banks;
    };

    // The ids of a bank in the graph that is being built, and what takes their place: slot ids, or a copy that is observed.
    // One node per (bank, ids), shared by its tensors.
    struct replaced_ids {
        ggml_tensor * ids = nullptr;
        ggml_tensor * by  = nullptr;
    };

    struct bank_of_tensor {
        int32_t       bank;
        ggml_tensor * stand_in; // NULL: not pooled
    };

    llama_context *    context = nullptr; // NULL when not attached, or when the context is gone
    llama_expert_hooks hooks   = {};

    std::vector<std::unique_ptr<expert_pool>> pools;        // per bank of the plan; NULL if left out
    std::vector<std::vector<ggml_tensor *>>   bank_tensors; // per bank: its expert tensors
    std::vector<replaced_ids>                 building;     // per bank
    int32_t                                   wave_bank = -1; // in waves, and not merged yet
    struct {
        ggml_tensor * input;
        ggml_tensor * ids;
        ggml_tensor * flat; // ids, contiguous
    } wave_route = {};
    std::map<ggml_backend_dev_t, wave_memory>               wave_memories;
    size_request                                            host_request;
    uint64_t                                                host_compute_bytes = 0; // left for the graphs by size_host_slots
    std::string                                             store_error;
    store_counters                                          store_base; // of the readers, when counting began
    replaced_ids                                            router_last;  // ids -> router weights, of the routing told last
    bool                                                    wants_weights = false;
    routing                                                 observed;
    std::unordered_map<const ggml_tensor *, bank_of_tensor> by_host;      // expert tensor -> its bank, and where it is pooled
    std::unordered_map<const ggml_tensor *, int32_t>        by_table;     // table -> bank
    std::unordered_set<ggml_backend_buffer_t>               own_buffers;  // of pools and waves
    std::unordered_map<const void *, graph_info>            graphs;
    graph_info *                                            current      = nullptr; // the graph that is being built
    const graph_info *                                      computing    = nullptr; // the graph that is being computed
    hotmoe_event                                            event        = {};      // phase, tokens and step of this ubatch
    uint64_t                                                step         = 0;
    bool                                                    said_cb_eval = false;
};

struct hotmoe_cache {
    hotmoe_cache_impl impl;
};
