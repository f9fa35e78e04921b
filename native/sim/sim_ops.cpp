// The cases follow ggml_backend_cuda_device_supports_op() of the llama.cpp release that is built here, so that graphs are
// split at the same nodes as on a GPU. Left out are training operations and image convolutions, which no language model
// needs. What CUDA decides by the chip is decided as for a recent one (tensor cores, CUB).

#include "sim_ops.h"

#include "sim_memory.h"

#include "ggml-impl.h"

#include <cstring>

static const int64_t SIM_FATTN_KQ_STRIDE = 256; // as CUDA's FATTN_KQ_STRIDE
static const int64_t SIM_QK_K            = 256; // elements in a super-block of the K and I quants

static bool sim_is_float(enum ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

// the quants with 32 elements in a block that kernels for KV caches know
static bool sim_is_legacy_quant(enum ggml_type type) {
    return type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q5_1 ||
        type == GGML_TYPE_Q8_0;
}

// quants that matrix multiplication and get_rows both know, whatever the row size
static bool sim_is_weight_quant(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q1_0:
        case GGML_TYPE_Q2_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ3_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ4_XS:
            return true;
        default:
            return false;
    }
}

static bool sim_supports_unary(const ggml_tensor * op) {
    switch (ggml_get_unary_op(op)) {
        case GGML_UNARY_OP_ABS:
        case GGML_UNARY_OP_SGN:
        case GGML_UNARY_OP_NEG:
        case GGML_UNARY_OP_STEP:
        case GGML_UNARY_OP_GELU:
        case GGML_UNARY_OP_SILU:
        case GGML_UNARY_OP_RELU:
        case GGML_UNARY_OP_SIGMOID:
        case GGML_UNARY_OP_HARDSIGMOID:
        case GGML_UNARY_OP_HARDSWISH:
        case GGML_UNARY_OP_GELU_ERF:
        case GGML_UNARY_OP_GELU_QUICK:
        case GGML_UNARY_OP_TANH:
        case GGML_UNARY_OP_EXP:
        case GGML_UNARY_OP_EXPM1:
        case GGML_UNARY_OP_SOFTPLUS:
        case GGML_UNARY_OP_ELU:
        case GGML_UNARY_OP_FLOOR:
        case GGML_UNARY_OP_CEIL:
        case GGML_UNARY_OP_ROUND:
        case GGML_UNARY_OP_TRUNC:
            return ggml_is_contiguous(op->src[0]);
        case GGML_UNARY_OP_XIELU:
            return ggml_is_contiguous(op->src[0]) && op->src[0]->type != GGML_TYPE_BF16;
        default:
            return false;
    }
}

static bool sim_supports_glu(const ggml_tensor * op) {
    switch (ggml_get_glu_op(op)) {
        case GGML_GLU_OP_REGLU:
        case GGML_GLU_OP_GEGLU:
        case GGML_GLU_OP_SWIGLU:
        case GGML_GLU_OP_GEGLU_ERF:
        case GGML_GLU_OP_GEGLU_QUICK:
            return ggml_is_contiguous_1(op->src[0]);
        case GGML_GLU_OP_SWIGLU_OAI:
        case GGML_GLU_OP_SWIGLU_CLAMP:
            return ggml_is_contiguous_1(op->src[0]) && op->src[0]->type != GGML_TYPE_BF16;
        default:
            return false;
    }
}

static bool sim_supports_mul_mat(const ggml_tensor * op) {
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    if (a->nb[0] != ggml_element_size(a) || b->nb[0] != ggml_element_size(b)) {
        return false;
    }
    if (b->type == GGML_TYPE_F16 && a->type != GGML_TYPE_F16) {
        return false;
    }
    if (op->op == GGML_OP_MUL_MAT_ID && ggml_get_op_params_i32(op, 3) == GGML_PREC_F32) {
        return false;
    }
    return sim_is_float(a->type) || sim_is_weight_quant(a->type) || a->type == GGML_TYPE_Q8_K ||
        a->type == GGML_TYPE_IQ4_NL || a->type == GGML_TYPE_MXFP4 || a->type == GGML_TYPE_NVFP4;
}

static bool sim_supports_get_rows(const ggml_tensor * op) {
    const enum ggml_type type = op->src[0]->type;
    if (type == GGML_TYPE_IQ4_NL || type == GGML_TYPE_MXFP4) {
        return op->src[0]->ne[0] % SIM_QK_K == 0;
    }
    return sim_is_float(type) || type == GGML_TYPE_I32 || sim_is_weight_quant(type);
}

static bool sim_supports_set_rows(const ggml_tensor * op) {
    const enum ggml_type from = op->src[0]->type;
    const bool           types =
        (from == GGML_TYPE_F32 && (sim_is_float(op->type) || sim_is_legacy_quant(op->type) || op->type == GGML_TYPE_IQ4_NL)) ||
        (from == GGML_TYPE_F16 && op->type == GGML_TYPE_F16);
    return types && (op->src[1]->type == GGML_TYPE_I64 || op->src[1]->type == GGML_TYPE_I32);
}

static bool sim_supports_cpy(const ggml_tensor * op) {
    const enum ggml_type from = op->src[0]->type;
    const enum ggml_type to   = op->src[1]->type;
    if (sim_is_float(from) && sim_is_float(to)) {
        return true;
    }
    if (from == GGML_TYPE_F32 && (sim_is_legacy_quant(to) || to == GGML_TYPE_IQ4_NL || to == GGML_TYPE_I32)) {
        return true;
    }
    if (to == GGML_TYPE_F32 && (sim_is_legacy_quant(from) || from == GGML_TYPE_I32)) {
        return true;
    }
    if (from == GGML_TYPE_I32 && to == GGML_TYPE_I32) {
        return true;
    }
    return from == to && ggml_is_contiguous(op->src[0]) && ggml_is_contiguous(op->src[1]);
}

static bool sim_supports_concat(const ggml_tensor * op) {
    const ggml_tensor * a = op->src[0];
    const ggml_tensor * b = op->src[1];
    if (a->type != b->type || a->type != op->type) {
        return false;
    }
    if (!ggml_is_quantized(a->type)) {
        return true;
    }
    const bool layout = ggml_get_op_params_i32(op, 0) == 3 ?
        ggml_is_contiguous(a) && ggml_is_contiguous(b) :
        ggml_is_contiguous_to_3(a) && ggml_is_contiguous_to_3(b);
    return layout && a->ne[0] % ggml_blck_size(a->type) == 0 && b->ne[0] % ggml_blck_size(b->type) == 0;
}

static bool sim_supports_binary(const ggml_tensor * op) {
    const enum ggml_type a = op->src[0]->type;
    const enum ggml_type b = op->src[1]->type;
    if (a == GGML_TYPE_BF16 || b == GGML_TYPE_BF16 || op->type == GGML_TYPE_BF16) {
        return a == GGML_TYPE_BF16 && op->type == GGML_TYPE_BF16 && (b == GGML_TYPE_BF16 || b == GGML_TYPE_F32);
    }
    return sim_is_float(a) && sim_is_float(b) && sim_is_float(op->type);
}

static bool sim_supports_flash_attn(const ggml_tensor * op) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * k    = op->src[1];
    const ggml_tensor * v    = op->src[2];
    const ggml_tensor * mask = op->src[3];

    const int64_t gqa_ratio = q->ne[2] / k->ne[2];

    float max_bias = 0.0f;
    memcpy(&max_bias, (const float *) op->op_params + 1, sizeof(float));

    // some head sizes exist only in kernels that process the query heads of a KV head together
    bool grouped = gqa_ratio >= 2 && mask && max_bias == 0.0f && k->ne[1] % SIM_FATTN_KQ_STRIDE == 0;
    for (const ggml_tensor * t : { q, k, v, mask }) {
        if (t == nullptr || ggml_is_quantized(t->type)) {
            continue;
        }
        for (int i = 1; i < GGML_MAX_DIMS; i++) {
            grouped = grouped && t->nb[i] % 16 == 0;
        }
    }

    switch (k->ne[0]) {
        case 40:
        case 64:
        case 72:
        case 80:
        case 96:
        case 112:
        case 128:
        case 256:
            if (v->ne[0] != k->ne[0]) {
                return false;
            }
            break;
        case 192:
            if (v->ne[0] != 128 || !grouped || gqa_ratio % 8 != 0) {
                return false;
            }
            break;
        case 320:
            if (v->ne[0] != 256 || !grouped || gqa_ratio % 32 != 0) {
                return false;
            }
            break;
        case 512:
            if (v->ne[0] != k->ne[0] || !grouped) {
                return false;
            }
            break;
        case 576:
            if (v->ne[0] != 512 || !grouped) {
                return false;
            }
            break;
        default:
            return false;
    }

    for (const ggml_tensor * t : { k, v }) {
        if (!sim_is_float(t->type) && !sim_is_legacy_quant(t->type)) {
            return false;
        }
    }
    return !mask || mask->ne[2] == 1;
}

static bool sim_supports_lightning_indexer(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0];
    const ggml_tensor * k = op->src[1];
    if (q->ne[0] != 128 || (q->ne[1] != 64 && q->ne[1] != 32)) {
        return false;
    }
    for (const ggml_tensor * t : { q, k }) {
        for (int i = 1; i < GGML_MAX_DIMS; i++) {
            if (!ggml_is_quantized(t->type) && t->nb[i] % 16 != 0) {
                return false;
            }
        }
    }
    return sim_is_float(k->type) || sim_is_legacy_quant(k->type);
}

static bool sim_supports_ssm_scan(const ggml_tensor * op) {
    const ggml_tensor * state = op->src[0];
    if (op->src[3]->ne[0] == 1) {
        return (state->ne[0] == 96 || state->ne[0] == 128 || state->ne[0] == 256) && state->ne[1] % 16 == 0;
    }
    return ggml_get_op_params_i32(op, 0) <= 1 &&
        state->ne[0] == 16 && state->ne[1] == 1 && state->ne[2] % 128 == 0 && op->src[4]->ne[1] == 1;
}

static bool sim_all_f32(const ggml_tensor * op) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i] && op->src[i]->type != GGML_TYPE_F32) {
            return false;
        }
    }
    return op->type == GGML_TYPE_F32;
}

static bool sim_supports_like_cuda(const ggml_tensor * op) {
    const ggml_tensor * a = op->src[0];
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
        case GGML_OP_ADD_ID:
        case GGML_OP_ADD1:
        case GGML_OP_SQR:
        case GGML_OP_SQRT:
        case GGML_OP_SIN:
        case GGML_OP_COS:
        case GGML_OP_CLAMP:
        case GGML_OP_LOG:
        case GGML_OP_ARGMAX:
        case GGML_OP_ARGSORT:
        case GGML_OP_TOP_K:
        case GGML_OP_DIAG_MASK_INF:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_PAD:
        case GGML_OP_ARANGE:
        case GGML_OP_LEAKY_RELU:
        case GGML_OP_RWKV_WKV6:
        case GGML_OP_RWKV_WKV7:
        case GGML_OP_GATED_LINEAR_ATTN:
        case GGML_OP_GATED_DELTA_NET:
        case GGML_OP_FILL:
        case GGML_OP_CUMSUM:
        case GGML_OP_TRI:
        case GGML_OP_DIAG:
        case GGML_OP_SOLVE_TRI:
            return true;
        case GGML_OP_UNARY:             return sim_supports_unary(op);
        case GGML_OP_GLU:               return sim_supports_glu(op);
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:        return sim_supports_mul_mat(op);
        case GGML_OP_GET_ROWS:          return sim_supports_get_rows(op);
        case GGML_OP_SET_ROWS:          return sim_supports_set_rows(op);
        case GGML_OP_CPY:               return sim_supports_cpy(op);
        case GGML_OP_CONCAT:            return sim_supports_concat(op);
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:               return sim_supports_binary(op);
        case GGML_OP_FLASH_ATTN_EXT:    return sim_supports_flash_attn(op);
        case GGML_OP_LIGHTNING_INDEXER: return sim_supports_lightning_indexer(op);
        case GGML_OP_SSM_SCAN:          return sim_supports_ssm_scan(op);
        case GGML_OP_SSM_CONV:          return a->ne[1] % 128 == 0;
        case GGML_OP_SET:
            return (op->type == GGML_TYPE_F32 || op->type == GGML_TYPE_I32) && op->type == a->type && op->type == op->src[1]->type;
        case GGML_OP_REPEAT:
            return a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_F16;
        case GGML_OP_SCALE:
            return (a->type == GGML_TYPE_F32 || a->type == GGML_TYPE_BF16) && op->type == a->type;
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM:
        case GGML_OP_SUM:
            return ggml_is_contiguous_rows(a);
        case GGML_OP_GROUP_NORM:
            return ggml_is_contiguous(a);
        case GGML_OP_SUM_ROWS:
        case GGML_OP_MEAN:
            return a->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 && ggml_is_contiguous_rows(a);
        case GGML_OP_ROPE:
            return a->nb[0] == ggml_type_size(a->type) && ggml_is_contiguous_2(a);
        case GGML_OP_ACC:
            return ggml_is_contiguous(a) && ggml_is_contiguous(op->src[1]);
        case GGML_OP_ROLL:
            return a->type == GGML_TYPE_F32 && ggml_is_contiguous(a);
        case GGML_OP_OUT_PROD:
        case GGML_OP_DSV4_HC_COMB:
        case GGML_OP_DSV4_HC_PRE:
        case GGML_OP_DSV4_HC_POST:
            return sim_all_f32(op);
        default:
            return false;
    }
}

bool sim_supports_op(sim_device & device, const ggml_tensor * op) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        ggml_backend_buffer_t buffer = op->src[i] ? op->src[i]->buffer : nullptr;
        if (!buffer) {
            continue;
        }
        // weights on another device stay there; weights that the CPU backend repacked have a layout that is its own secret
        sim_device * owner = sim_buffer_device(buffer);
        if (owner && owner != &device) {
            return false;
        }
        ggml_backend_dev_t dev = buffer->buft->device;
        if (!owner && dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU && !ggml_backend_buffer_is_host(buffer)) {
            return false;
        }
    }
    if (!sim_supports_like_cuda(op)) {
        return false;
    }
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return cpu && ggml_backend_dev_supports_op(cpu, op);
}

bool sim_offload_op(const ggml_tensor * op) {
    int64_t n_tokens;
    switch (op->op) {
        case GGML_OP_GET_ROWS:   n_tokens = 0; break;
        case GGML_OP_MUL_MAT:    n_tokens = op->ne[1]; break;
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:       n_tokens = op->ne[2]; break;
        default:                 n_tokens = ggml_nrows(op); break;
    }
    return n_tokens >= sim().offload_min_batch;
}
