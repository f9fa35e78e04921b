#include "sim_graph.h"

#include "sim_memory.h"
#include "sim_ops.h"

#include <cmath>

bool sim_is_noop(const ggml_tensor * node) {
    return ggml_is_empty(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0 ||
        node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW ||
        node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

static sim_span sim_span_of(const ggml_tensor * tensor) {
    if (!tensor->data || ggml_is_empty(tensor)) {
        return {};
    }
    const uint8_t * data = (const uint8_t *) tensor->data;
    return { data, data + ggml_nbytes(tensor) };
}

static bool sim_overlap(const sim_span & a, const sim_span & b) {
    return a.begin < b.end && b.begin < a.end;
}

// creation

ggml_tensor * sim_graph::clone(const ggml_tensor * tensor) {
    auto it = clones.find(tensor);
    if (it != clones.end()) {
        return it->second;
    }
    tensors.push_back(*tensor);
    ggml_tensor * copy = &tensors.back();
    clones[tensor]     = copy;

    sim_alloc    alloc;
    const size_t nbytes = ggml_is_empty(tensor) ? 0 : ggml_nbytes(tensor);

    copy->data   = tensor->data ? sim_translate(device, tensor->data, nbytes, &alloc) : nullptr;
    copy->buffer = copy->data ? alloc.inner : nullptr;
    copy->extra  = nullptr;
    if (tensor->view_src) {
        copy->view_src = clone(tensor->view_src);
    }
    for (ggml_tensor *& src : copy->src) {
        src = nullptr; // set for nodes; kernels do not look behind their operands
    }
    return copy;
}

// The CPU backend fuses operations whose result nobody else reads. It would decide otherwise without these counts, and
// the results would differ in their last bits.
void sim_graph::clone_use_counts(const ggml_cgraph * graph) {
    const size_t size = 2 * tensors.size() + 1;
    hash_used.assign(ggml_bitset_size(size), 0);
    hash_keys.assign(size, nullptr);
    use_counts.assign(size, 0);

    cgraph.visited_hash_set.size = size;
    cgraph.visited_hash_set.used = hash_used.data();
    cgraph.visited_hash_set.keys = hash_keys.data();
    cgraph.use_counts            = use_counts.data();

    const ggml_hash_set & visited = graph->visited_hash_set;
    if (visited.size == 0 || graph->use_counts == nullptr) {
        return;
    }
    for (const auto & it : clones) {
        const size_t from = ggml_hash_find(&visited, it.first);
        if (from != GGML_HASHSET_FULL && ggml_bitset_get(visited.used, from)) {
            use_counts[ggml_hash_insert(&cgraph.visited_hash_set, it.second)] = graph->use_counts[from];
        }
    }
}

// What is wrong with the place of an operand, for people.
static std::string sim_describe_place(sim_device & device, const ggml_tensor * tensor) {
    if (!tensor->data) {
        return "has no memory";
    }
    if (sim_is_freed(device, tensor->data)) {
        return "lies in a buffer of " + device.name + " that was freed";
    }
    ggml_backend_buffer_t buffer = sim_tensor_buffer(tensor);
    const std::string     name   = buffer ? ggml_backend_buffer_name(buffer) : "none";
    return "lies outside the memory of " + device.name + " (its buffer: " + name + ")";
}

std::unique_ptr<sim_graph> sim_graph::create(sim_device & device, const ggml_cgraph * graph, enum ggml_status & status) {
    std::unique_ptr<sim_graph> result(new sim_graph(device));
    status = GGML_STATUS_FAILED;

    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        ggml_tensor *       copy = result->clone(node);
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            copy->src[j] = node->src[j] ? result->clone(node->src[j]) : nullptr;
        }
        result->nodes.push_back(copy);
        result->written.push_back({});

        if (sim_is_noop(node)) {
            continue;
        }
        result->kernels++;

        if (!copy->data) {
            GGML_LOG_ERROR("sim: %s: result '%s' (%s) %s\n", device.name.c_str(), node->name, ggml_op_desc(node),
                           sim_describe_place(device, node).c_str());
            return nullptr;
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const ggml_tensor * src = node->src[j];
            if (src && !copy->src[j]->data && !ggml_is_empty(src)) {
                GGML_LOG_ERROR("sim: %s: operand %d of '%s' (%s), '%s', %s\n", device.name.c_str(), j, node->name,
                               ggml_op_desc(node), src->name, sim_describe_place(device, src).c_str());
                return nullptr;
            }
        }
        result->written.back() = sim_span_of(copy);
        if (!sim_supports_op(device, node)) {
            GGML_LOG_ERROR("sim: %s: cannot compute '%s' (%s)\n", device.name.c_str(), node->name, ggml_op_desc(node));
            return nullptr;
        }
    }

    result->cgraph.size    = graph->n_nodes;
    result->cgraph.n_nodes = graph->n_nodes;
    result->cgraph.nodes   = result->nodes.data();
    result->cgraph.order   = graph->order;
    result->clone_use_counts(graph);
    result->clones.clear();

    status = GGML_STATUS_SUCCESS;
    return result;
}

bool sim_graph::uses(const uint8_t * base, size_t size) const {
    for (const ggml_tensor & tensor : tensors) {
        if (sim_overlap(sim_span_of(&tensor), { base, base + size })) {
            return true;
        }
    }
    return false;
}

// checks of values
//
// With wrong indices the CPU kernels abort the process or access memory out of bounds, and sorting NaN is undefined. Both
// are what a missing synchronisation produces (poison is -1 and NaN), so they are looked for, and fail the graph instead.
// That needs the values as they will be when the kernel runs: a graph is cut before a node whose operand is made in it.

struct sim_check {
    const ggml_tensor * tensor = nullptr; // the operand to look at
    int64_t             limit  = 0;       // indices: all of them are in [0, limit)
    bool                nan    = false;   // instead: F32 values, none of them NaN
};

static sim_check sim_check_of(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_GET_ROWS:   return { node->src[1], node->src[0]->ne[1], false };
        case GGML_OP_SET_ROWS:   return { node->src[1], node->ne[1], false };
        case GGML_OP_MUL_MAT_ID: return { node->src[2], node->src[0]->ne[2], false };
        case GGML_OP_ADD_ID:     return { node->src[2], node->src[1]->ne[1], false };
        case GGML_OP_ARGSORT:
        case GGML_OP_TOP_K:      return { node->src[0], 0, true };
        default:                 return {};
    }
}

static const uint8_t * sim_element(const ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
    return (const uint8_t *) t->data + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

static bool sim_check_row(const sim_device & device, const ggml_tensor * node, const sim_check & check, int64_t i1, int64_t i2, int64_t i3) {
    const ggml_tensor * t = check.tensor;
    for (int64_t i0 = 0; i0 < t->ne[0]; i0++) {
        const uint8_t * p = sim_element(t, i0, i1, i2, i3);
        if (check.nan) {
            if (std::isnan(*(const float *) p)) {
                GGML_LOG_ERROR("sim: %s: '%s' (%s): element %lld of row %lld of '%s' is NaN\n", device.name.c_str(),
                               node->name, ggml_op_desc(node), (long long) i0, (long long) i1, t->name);
                return false;
            }
            continue;
        }
        const int64_t index = t->type == GGML_TYPE_I64 ? *(const int64_t *) p : *(const int32_t *) p;
        if (index < 0 || index >= check.limit) {
            GGML_LOG_ERROR("sim: %s: '%s' (%s): index %lld in element %lld of row %lld of '%s' is not in 0 .. %lld\n",
                           device.name.c_str(), node->name, ggml_op_desc(node), (long long) index, (long long) i0, (long long) i1,
                           t->name, (long long) check.limit - 1);
            return false;
        }
    }
    return true;
}

static bool sim_check_values(const sim_device & device, const ggml_tensor * node, const sim_check & check) {
    const ggml_tensor * t = check.tensor;
    for (int64_t i3 = 0; i3 < t->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < t->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < t->ne[1]; i1++) {
                if (!sim_check_row(device, node, check, i1, i2, i3)) {
                    return false;
                }
            }
        }
    }
    return true;
}

// Ids that occur twice for one token: (row of ids, value) pairs beyond the first. GPU kernels for batches assume there are none.
static uint64_t sim_count_duplicates(const ggml_tensor * ids) {
    uint64_t n = 0;
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        for (int64_t i0 = 1; i0 < ids->ne[0]; i0++) {
            const int32_t id = *(const int32_t *) sim_element(ids, i0, i1, 0, 0);
            for (int64_t k = 0; k < i0; k++) {
                if (*(const int32_t *) sim_element(ids, k, i1, 0, 0) == id) {
                    n++;
                    break;
                }
            }
        }
    }
    return n;
}

// execution

enum ggml_status sim_graph::compute_range(ggml_backend_t backend, int first, int last) {
    if (first == last) {
        return GGML_STATUS_SUCCESS;
    }
    ggml_cgraph range = cgraph;
    range.nodes      += first;
    range.n_nodes     = last - first;
    return ggml_backend_graph_compute(backend, &range);
}

enum ggml_status sim_graph::compute(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t reg           = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    auto               set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set_n_threads) {
        set_n_threads(backend, n_threads);
    }

    int first = 0; // first node that has not run
    for (int i = 0; i < cgraph.n_nodes; i++) {
        const ggml_tensor * node = nodes[i];
        if (sim_is_noop(node)) {
            continue;
        }
        const sim_check check = sim_check_of(node);
        if (!check.tensor || ggml_is_empty(check.tensor)) {
            continue;
        }
        const sim_span operand = sim_span_of(check.tensor);
        for (int k = first; k < i; k++) {
            if (sim_overlap(written[k], operand)) {
                const enum ggml_status status = compute_range(backend, first, i);
                if (status != GGML_STATUS_SUCCESS) {
                    return status;
                }
                first = i;
                break;
            }
        }
        if (!sim_check_values(device, node, check)) {
            return GGML_STATUS_FAILED;
        }
        if (node->op == GGML_OP_MUL_MAT_ID) {
            device.counters.n_dup_ids += sim_count_duplicates(check.tensor);
        }
    }
    return compute_range(backend, first, cgraph.n_nodes);
}
