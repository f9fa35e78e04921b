// A graph as it was when it was submitted, over the device's real memory.

#pragma once

#include "sim_device.h"

#include "ggml-impl.h"

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

struct sim_span {
    const uint8_t * begin = nullptr;
    const uint8_t * end   = nullptr;
};

// ggml's graphs and tensors belong to the caller, who may rebuild or free them as soon as the submitting call returns (a
// GPU has copied what it needs into its kernels' arguments by then). So everything is cloned.
struct sim_graph {
    // Clones the graph. On failure logs what is wrong with which tensor, sets status, and returns NULL.
    static std::unique_ptr<sim_graph> create(sim_device & device, const ggml_cgraph * graph, enum ggml_status & status);

    // Runs it on a CPU backend. Index operands are checked before they are used; see sim_graph.cpp.
    enum ggml_status compute(ggml_backend_t backend, int n_threads);

    // Whether an operand lies in the real memory [base, base + size).
    bool uses(const uint8_t * base, size_t size) const;

    // nodes that compute
    int n_kernels() const { return kernels; }

  private:
    sim_graph(sim_device & device) : device(device) {}

    ggml_tensor * clone(const ggml_tensor * tensor);
    void          clone_use_counts(const ggml_cgraph * graph);

    enum ggml_status compute_range(ggml_backend_t backend, int first, int last);

    sim_device & device;
    int          kernels = 0;

    std::deque<ggml_tensor>                                tensors; // stable addresses
    std::unordered_map<const ggml_tensor *, ggml_tensor *> clones;  // original -> clone, while creating
    std::vector<ggml_tensor *>                             nodes;
    std::vector<sim_span>                                  written; // by each node; empty if it does no work

    std::vector<ggml_bitset_t> hash_used;
    std::vector<ggml_tensor *> hash_keys;
    std::vector<int32_t>       use_counts;
    ggml_cgraph                cgraph = {};
};

// Whether a node of a graph does no work: views, empty tensors, and nodes that are not flagged to be computed.
bool sim_is_noop(const ggml_tensor * node);
