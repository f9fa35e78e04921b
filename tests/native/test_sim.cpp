// Test of the simulated accelerator. Prints a line per check and, last, 'N passed, N failed'; returns 1 if any failed.
//
// A check that something is caught is paired with the same program where nothing is to be caught, so that neither can
// pass vacuously.

#include "hotmoe/sim.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

static int n_passed = 0;
static int n_failed = 0;

static bool check(bool ok, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    printf("%s  ", ok ? "ok  " : "FAIL");
    vprintf(fmt, args);
    printf("\n");
    va_end(args);
    fflush(stdout);
    (ok ? n_passed : n_failed)++;
    return ok;
}

// log lines are kept, so that checks can look for the message of a failure

static std::string log_text;

static void log_callback(enum ggml_log_level level, const char * text, void * user_data) {
    if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
        log_text += text;
    }
    (void) user_data;
}

static bool log_has(const char * text) {
    return log_text.find(text) != std::string::npos;
}

// for the messages of failed graphs: 'what', then the first line that was logged
static void check_log(bool ok, const char * what) {
    check(ok, "%s: %s", what, log_text.substr(0, log_text.find('\n')).c_str());
}

// helpers

static const size_t MiB        = 1024 * 1024;
static const size_t CAPACITY   = 64 * MiB;
static const size_t GRAPH_SIZE = 128; // nodes
static const int    N_SEEDS    = 40;

static ggml_backend_dev_t sim_dev[2];
static ggml_backend_dev_t cpu_dev;

static std::string module_path() {
    Dl_info info;
    return dladdr((void *) hotmoe_sim_configure, &info) ? info.dli_fname : "";
}

static hotmoe_sim_counters counters(int dev = 0) {
    hotmoe_sim_counters c = {};
    c.struct_size         = sizeof(c);
    if (hotmoe_sim_get_counters(dev, &c) != HOTMOE_SIM_OK) {
        check(false, "counters of device %d: %s", dev, hotmoe_sim_last_error());
    }
    return c;
}

static void reset_counters() {
    hotmoe_sim_reset_counters(0);
    hotmoe_sim_reset_counters(1);
}

static void set_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    auto               fn  = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    fn(backend, n_threads);
}

// Tensors of one buffer, or of none yet.
struct tensors {
    ggml_context *        ctx    = nullptr;
    ggml_backend_buffer_t buffer = nullptr;

    tensors() {
        ggml_init_params params = { ggml_tensor_overhead() * 64 + 32 * ggml_graph_overhead_custom(GRAPH_SIZE, false), nullptr, true };
        ctx                     = ggml_init(params);
    }
    tensors(const tensors &) = delete;
    ~tensors() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    bool alloc(ggml_backend_buffer_type_t buft, enum ggml_backend_buffer_usage usage = GGML_BACKEND_BUFFER_USAGE_ANY) {
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
        if (buffer) {
            ggml_backend_buffer_set_usage(buffer, usage);
        }
        return buffer != nullptr;
    }
    bool          alloc(ggml_backend_t backend) { return alloc(ggml_backend_get_default_buffer_type(backend)); }
    ggml_tensor * f32(int64_t ne0, int64_t ne1 = 1) { return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1); }
};

static std::vector<float> random_floats(size_t n, uint32_t seed, float scale = 1.0f) {
    std::mt19937       rng(seed);
    std::vector<float> v(n);
    for (float & x : v) {
        x = scale * ((int) (rng() % 2001) - 1000) / 1000.0f;
    }
    return v;
}

static void fill(ggml_tensor * t, uint32_t seed, float scale = 1.0f) {
    const std::vector<float> v = random_floats(ggml_nelements(t), seed, scale);
    std::vector<uint8_t>     data(ggml_nbytes(t));
    if (t->type == GGML_TYPE_F32) {
        memcpy(data.data(), v.data(), data.size());
    } else {
        ggml_quantize_chunk(t->type, v.data(), data.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
    }
    ggml_backend_tensor_set(t, data.data(), 0, data.size());
}

template <typename T> static void set(ggml_tensor * t, const std::vector<T> & v) {
    ggml_backend_tensor_set(t, v.data(), 0, v.size() * sizeof(T));
}

static std::vector<float> get(const ggml_tensor * t) {
    std::vector<float> v(ggml_nbytes(t) / sizeof(float));
    ggml_backend_tensor_get(t, v.data(), 0, v.size() * sizeof(float));
    return v;
}

static bool equal(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

static bool all_are(const std::vector<float> & v, float value) {
    for (float x : v) {
        if (x != value) { // also if NaN
            return false;
        }
    }
    return !v.empty();
}

// A graph over allocated tensors, for one node.
static ggml_cgraph * graph_of(tensors & t, ggml_tensor * node) {
    ggml_cgraph * graph = ggml_new_graph_custom(t.ctx, GRAPH_SIZE, false);
    ggml_build_forward_expand(graph, node);
    return graph;
}

// device and memory

static void test_config_errors() {
    hotmoe_sim_config config;
    hotmoe_sim_default_config(&config);
    check(config.n_devices == 1 && config.bytes_per_device == 1024 * MiB && config.poison && config.strict_mode == 0, "default configuration");

    check(hotmoe_sim_configure(nullptr) == HOTMOE_SIM_ERR_ARGUMENT, "configure: NULL refused");
    config.n_devices = 17;
    check(hotmoe_sim_configure(&config) == HOTMOE_SIM_ERR_ARGUMENT && strstr(hotmoe_sim_last_error(), "17"), "configure: message '%s'", hotmoe_sim_last_error());
    hotmoe_sim_default_config(&config);
    config.bytes_per_device = 0;
    check(hotmoe_sim_configure(&config) == HOTMOE_SIM_ERR_ARGUMENT, "configure: no memory refused");
    hotmoe_sim_default_config(&config);
    config.strict_mode = 3;
    check(hotmoe_sim_configure(&config) == HOTMOE_SIM_ERR_ARGUMENT, "configure: strict mode 3 refused");
    hotmoe_sim_default_config(&config);
    config.struct_size = sizeof(config) + 8;
    check(hotmoe_sim_configure(&config) == HOTMOE_SIM_ERR_ARGUMENT, "configure: larger struct refused");
    hotmoe_sim_counters c = {};
    c.struct_size         = sizeof(c);
    check(hotmoe_sim_get_counters(0, &c) == HOTMOE_SIM_ERR_ARGUMENT && hotmoe_sim_device_count() == 0, "no devices before registration");
}

static bool test_presence() {
    check(ggml_backend_dev_by_name("SIM0") == nullptr, "not present before it is loaded");

    hotmoe_sim_config config;
    hotmoe_sim_default_config(&config);
    config.n_devices         = 2;
    config.bytes_per_device  = CAPACITY;
    config.host_pinned_limit = 8 * MiB;
    config.offload_min_batch = 32;
    check(hotmoe_sim_configure(&config) == HOTMOE_SIM_OK, "configure two devices");

    ggml_backend_reg_t reg = ggml_backend_load(module_path().c_str());
    if (!check(reg != nullptr, "ggml_backend_load(%s)", strrchr(module_path().c_str(), '/') + 1)) {
        return false;
    }
    check(hotmoe_sim_configure(&config) == HOTMOE_SIM_ERR_BUSY, "configure after loading refused: '%s'", hotmoe_sim_last_error());
    const size_t n_dev = ggml_backend_dev_count();
    check(hotmoe_sim_register() == HOTMOE_SIM_OK && ggml_backend_dev_count() == n_dev, "registering again adds nothing");
    check(strcmp(ggml_backend_reg_name(reg), "SIM") == 0 && ggml_backend_reg_dev_count(reg) == 2 && hotmoe_sim_device_count() == 2, "registry SIM with 2 devices");

    cpu_dev    = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    sim_dev[0] = ggml_backend_dev_by_name("SIM0");
    sim_dev[1] = ggml_backend_dev_by_name("SIM1");
    if (!check(sim_dev[0] && sim_dev[1] && cpu_dev, "SIM0, SIM1 and CPU found by name")) {
        return false;
    }

    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(sim_dev[1], &props);
    check(props.type == GGML_BACKEND_DEVICE_TYPE_GPU && props.device_id == nullptr && props.memory_total == CAPACITY && props.memory_free == CAPACITY, "properties");
    check(props.caps.async && props.caps.host_buffer && props.caps.events && !props.caps.buffer_from_host_ptr, "capabilities");

    ggml_backend_buffer_type_t buft0 = ggml_backend_dev_buffer_type(sim_dev[0]);
    ggml_backend_buffer_type_t buft1 = ggml_backend_dev_buffer_type(sim_dev[1]);
    ggml_backend_buffer_type_t host  = ggml_backend_dev_host_buffer_type(sim_dev[0]);
    check(!ggml_backend_buft_is_host(buft0) && ggml_backend_buft_is_host(host), "device memory is not host memory, pinned memory is");
    check(ggml_backend_dev_supports_buft(sim_dev[0], buft0) && !ggml_backend_dev_supports_buft(sim_dev[0], buft1) &&
              !ggml_backend_dev_supports_buft(sim_dev[0], host) && !ggml_backend_dev_supports_buft(sim_dev[0], ggml_backend_cpu_buffer_type()) &&
              !ggml_backend_dev_supports_buft(cpu_dev, buft0),
          "supports_buft: own memory only");
    return true;
}

static size_t free_bytes(int dev) {
    size_t free, total;
    ggml_backend_dev_memory(sim_dev[dev], &free, &total);
    return free;
}

static bool child_faults(const std::function<void()> & fn) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        fn();
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) && (WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS);
}

static void test_memory() {
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(sim_dev[0]);

    reset_counters();
    ggml_backend_buffer_t a = ggml_backend_buft_alloc_buffer(buft, 40 * MiB);
    check(a && free_bytes(0) == 24 * MiB && free_bytes(1) == CAPACITY, "40 MiB allocated, 24 of 64 free");
    check(ggml_backend_buft_alloc_buffer(buft, 24 * MiB + 1) == nullptr && log_has("out of memory"), "one byte too much: NULL");
    ggml_backend_buffer_t b = ggml_backend_buft_alloc_buffer(buft, 24 * MiB);
    check(b && free_bytes(0) == 0, "what is left fits exactly");
    check(counters().allocated_bytes == CAPACITY && counters().peak_bytes == CAPACITY, "allocated and peak bytes");
    ggml_backend_buffer_free(b);

    char * base = (char *) ggml_backend_buffer_get_base(a);
    check(child_faults([&] { *(volatile char *) base; }), "host read of device memory faults");
    check(child_faults([&] { *(volatile char *) base = 1; }), "host write of device memory faults");
    ggml_backend_buffer_free(a);
    check(child_faults([&] { *(volatile char *) base; }), "host read of freed device memory faults");
    check(free_bytes(0) == CAPACITY && counters().allocated_bytes == 0 && counters().peak_bytes == CAPACITY, "all given back, peak stays");
    hotmoe_sim_reset_counters(0);
    check(counters().peak_bytes == 0, "reset: peak is what is in use");

    tensors       t;
    ggml_tensor * x = t.f32(1024);
    t.alloc(buft);
    std::vector<uint8_t> bytes(4096);
    ggml_backend_tensor_get(x, bytes.data(), 0, bytes.size());
    check(bytes == std::vector<uint8_t>(4096, 0xFF), "new device memory is poisoned");

    ggml_backend_buffer_type_t host   = ggml_backend_dev_host_buffer_type(sim_dev[0]);
    ggml_backend_buffer_t      p      = ggml_backend_buft_alloc_buffer(host, 5 * MiB);
    char *                     pinned = (char *) ggml_backend_buffer_get_base(p);
    check(!child_faults([&] { *(volatile char *) pinned; }), "pinned memory is readable");
    check(counters().host_pinned_bytes == 5 * MiB && ggml_backend_buffer_get_type(p) == host, "pinned bytes");
    ggml_backend_buffer_t q = ggml_backend_buft_alloc_buffer(host, 4 * MiB);
    check(q && ggml_backend_buffer_get_type(q) == ggml_backend_cpu_buffer_type() && counters().host_pinned_bytes == 5 * MiB, "beyond the limit: plain CPU memory");
    ggml_backend_buffer_free(q);
    ggml_backend_buffer_free(p);

    ggml_backend_reg_t reg        = ggml_backend_dev_backend_reg(sim_dev[0]);
    auto               reg_host   = (bool (*)(void *, size_t)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_register_host_buffer");
    auto               unreg_host = (void (*)(void *)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_unregister_host_buffer");
    std::vector<char>  own(MiB);
    check(reg_host(own.data(), own.size()) && counters().host_pinned_bytes == MiB && !reg_host(own.data(), 9 * MiB), "register host memory as pinned");
    unreg_host(own.data());
    check(counters().host_pinned_bytes == 0, "all pinned memory given back");

    tensors       w;
    ggml_tensor * wq = ggml_new_tensor_2d(w.ctx, GGML_TYPE_Q8_0, 32, 3);
    check(ggml_backend_buft_get_alloc_size(buft, wq) == ggml_nbytes(wq) + ggml_row_size(GGML_TYPE_Q8_0, 480), "rows are padded to 512 as for CUDA");
}

// operations

static void test_supports_op() {
    tensors       t;
    auto          q         = [&](enum ggml_type type, int64_t ne0 = 256) { return ggml_new_tensor_2d(t.ctx, type, ne0, 16); };
    ggml_tensor * ids       = ggml_new_tensor_1d(t.ctx, GGML_TYPE_I32, 4);
    ggml_tensor * x         = t.f32(256, 4);
    auto          supported = [&](ggml_tensor * op) { return ggml_backend_dev_supports_op(sim_dev[0], op); };
    auto          rows      = [&](enum ggml_type type, int64_t ne0 = 256) { return supported(ggml_get_rows(t.ctx, q(type, ne0), ids)); };

    check(rows(GGML_TYPE_I32) && rows(GGML_TYPE_F32) && rows(GGML_TYPE_F16) && rows(GGML_TYPE_BF16) && rows(GGML_TYPE_Q4_0) &&
              rows(GGML_TYPE_Q8_0) && rows(GGML_TYPE_Q4_K) && rows(GGML_TYPE_MXFP4),
          "GET_ROWS of the types that CUDA takes");
    check(!rows(GGML_TYPE_Q8_K) && !rows(GGML_TYPE_MXFP4, 32) && !rows(GGML_TYPE_TQ1_0), "GET_ROWS of others refused");
    check(supported(ggml_mul_mat(t.ctx, q(GGML_TYPE_MXFP4), x)) && supported(ggml_mul_mat(t.ctx, q(GGML_TYPE_Q6_K), x)), "MUL_MAT of quants");
    check(!supported(ggml_mul_mat(t.ctx, q(GGML_TYPE_TQ1_0), x)), "MUL_MAT of TQ1_0 refused");

    auto attn = [&](int64_t head) {
        ggml_tensor * qq = ggml_new_tensor_3d(t.ctx, GGML_TYPE_F32, head, 2, 4);
        ggml_tensor * kk = ggml_new_tensor_3d(t.ctx, GGML_TYPE_F16, head, 256, 4);
        return supported(ggml_flash_attn_ext(t.ctx, qq, kk, kk, nullptr, 1.0f, 0.0f, 0.0f));
    };
    check(attn(64) && attn(128) && !attn(32) && !attn(576), "FLASH_ATTN_EXT by head size");
    check(supported(ggml_argsort(t.ctx, x, GGML_SORT_ORDER_DESC)) && supported(ggml_top_k(t.ctx, x, 2)) && supported(ggml_soft_max(t.ctx, x)) &&
              supported(ggml_cont(t.ctx, x)) && supported(ggml_swiglu(t.ctx, x)),
          "ARGSORT, TOP_K, SOFT_MAX, CONT, GLU");
    auto custom = [](ggml_tensor *, const ggml_tensor *, int, int, void *) {};
    check(!supported(ggml_map_custom1(t.ctx, x, custom, 1, nullptr)), "custom operations refused");

    tensors       other;
    ggml_tensor * w1 = other.f32(256, 16);
    other.alloc(ggml_backend_dev_buffer_type(sim_dev[1]));
    check(!supported(ggml_mul_mat(t.ctx, w1, x)) && ggml_backend_dev_supports_op(sim_dev[1], ggml_mul_mat(t.ctx, w1, x)), "weights of another device refused");

    auto                         extra_bufts = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_dev), "ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t * extra       = extra_bufts ? extra_bufts(cpu_dev) : nullptr;
    int                          n_extra     = 0;
    for (; extra && *extra; extra++) {
        tensors       repack;
        ggml_tensor * w = ggml_new_tensor_2d(repack.ctx, GGML_TYPE_Q4_0, 256, 64);
        if (repack.alloc(*extra)) {
            n_extra++;
            check(!supported(ggml_mul_mat(t.ctx, w, x)), "weights in %s refused", ggml_backend_buft_name(*extra));
        }
    }
    if (n_extra == 0) {
        printf("--    this CPU backend has no extra buffer types\n");
    }
}

// A piece of a mixture-of-experts layer with attention: every kind of operation that matters here, and the id remap.
static std::vector<float> run_mixed(ggml_backend_t backend, int n_threads, uint32_t weight_seed = 7, bool swap_slots = false) {
    const int64_t        n_embd = 256, n_expert = 8, top_k = 2, n_tokens = 5, n_kv = 32;
    const enum ggml_type types[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, GGML_TYPE_MXFP4, GGML_TYPE_F16 };

    tensors       w;
    ggml_tensor * x      = w.f32(n_embd, n_tokens);
    ggml_tensor * gamma  = w.f32(n_embd);
    ggml_tensor * router = w.f32(n_embd, n_expert);
    ggml_tensor * bias   = w.f32(n_embd, n_expert);
    ggml_tensor * table  = ggml_new_tensor_2d(w.ctx, GGML_TYPE_I32, 1, n_expert);
    ggml_tensor * pos    = ggml_new_tensor_1d(w.ctx, GGML_TYPE_I32, n_tokens);
    ggml_tensor * cells  = ggml_new_tensor_1d(w.ctx, GGML_TYPE_I64, n_tokens);
    ggml_tensor * cache  = ggml_new_tensor_2d(w.ctx, GGML_TYPE_F16, n_embd, n_kv);
    ggml_tensor * experts[4];
    for (int i = 0; i < 4; i++) {
        experts[i] = ggml_new_tensor_3d(w.ctx, types[i], n_embd, n_embd, n_expert);
    }
    w.alloc(backend);
    ggml_backend_buffer_clear(w.buffer, 0);

    fill(x, 1);
    fill(gamma, 2);
    fill(router, 3);
    fill(bias, 4);
    for (int i = 0; i < 4; i++) {
        fill(experts[i], weight_seed + i, 0.1f);
    }
    std::vector<int32_t> slots = { 3, 7, 1, 0, 6, 2, 5, 4 };
    if (swap_slots) {
        std::swap(slots[0], slots[1]);
    }
    set<int32_t>(table, slots);
    set<int32_t>(pos, { 0, 1, 2, 3, 4 });
    set<int64_t>(cells, { 9, 4, 30, 0, 17 });

    tensors        g;
    ggml_context * ctx      = g.ctx;
    ggml_tensor *  norm     = ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-6f), gamma); // fused on the CPU if the counts are right
    ggml_tensor *  probs    = ggml_soft_max(ctx, ggml_mul_mat(ctx, router, norm));
    ggml_tensor *  order    = ggml_argsort(ctx, probs, GGML_SORT_ORDER_DESC);
    ggml_tensor *  ids      = ggml_cont(ctx, ggml_view_2d(ctx, order, top_k, n_tokens, order->nb[1], 0));
    ggml_tensor *  slot_ids = ggml_reshape_2d(ctx, ggml_get_rows(ctx, table, ggml_reshape_1d(ctx, ids, top_k * n_tokens)), top_k, n_tokens);

    ggml_tensor * sum = nullptr;
    for (int i = 0; i < 4; i++) {
        ggml_tensor * y = ggml_mul_mat_id(ctx, experts[i], ggml_reshape_3d(ctx, norm, n_embd, 1, n_tokens), slot_ids);
        y               = ggml_add_id(ctx, y, bias, ids);
        sum             = sum ? ggml_swiglu_split(ctx, sum, y) : y;
    }
    ggml_tensor * weights = ggml_get_rows(ctx, ggml_reshape_3d(ctx, probs, 1, n_expert, n_tokens), ids);
    ggml_tensor * moe     = ggml_mul(ctx, sum, weights);

    ggml_tensor * kv   = ggml_set_rows(ctx, cache, norm, cells);
    ggml_tensor * k    = ggml_permute(ctx, ggml_reshape_3d(ctx, kv, 64, 4, n_kv), 0, 2, 1, 3);
    ggml_tensor * q    = ggml_rope(ctx, ggml_reshape_3d(ctx, norm, 64, 4, n_tokens), pos, 64, 0);
    ggml_tensor * attn = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), k, k, nullptr, 0.125f, 0.0f, 0.0f);

    ggml_set_output(moe);
    ggml_set_output(attn);
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, GRAPH_SIZE, false);
    ggml_build_forward_expand(graph, moe);
    ggml_build_forward_expand(graph, attn);

    ggml_gallocr_t galloc = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    ggml_gallocr_alloc_graph(galloc, graph);
    set_threads(backend, n_threads);
    std::vector<float> result;
    if (ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS) {
        result                     = get(moe);
        const std::vector<float> a = get(attn);
        result.insert(result.end(), a.begin(), a.end());
    }
    ggml_gallocr_free(galloc);
    return result;
}

// One query over a long KV cache: the CPU kernel splits the cache by threads, and so the sum.
static std::vector<float> run_attention(ggml_backend_t backend, int n_threads) {
    tensors       t;
    ggml_tensor * q = ggml_new_tensor_3d(t.ctx, GGML_TYPE_F32, 64, 1, 4);
    ggml_tensor * k = ggml_new_tensor_3d(t.ctx, GGML_TYPE_F16, 64, 2048, 4);
    ggml_tensor * y = ggml_flash_attn_ext(t.ctx, q, k, k, nullptr, 0.125f, 0.0f, 0.0f);
    t.alloc(backend);
    fill(q, 1);
    fill(k, 2);
    set_threads(backend, n_threads);
    return ggml_backend_graph_compute(backend, graph_of(t, y)) == GGML_STATUS_SUCCESS ? get(y) : std::vector<float>();
}

// RMS_NORM and MUL; returns what is left in the memory of the former, which is written only if the two are not fused.
static std::vector<float> run_norm(ggml_backend_t backend) {
    tensors       t;
    ggml_tensor * x = t.f32(256);
    ggml_tensor * w = t.f32(256);
    ggml_tensor * n = ggml_rms_norm(t.ctx, x, 1e-6f);
    ggml_tensor * y = ggml_mul(t.ctx, n, w);
    t.alloc(backend);
    fill(x, 1);
    fill(w, 2);
    set(n, std::vector<float>(256, 5.0f));
    return ggml_backend_graph_compute(backend, graph_of(t, y)) == GGML_STATUS_SUCCESS ? get(n) : std::vector<float>();
}

static void test_equality() {
    ggml_backend_t cpu = ggml_backend_dev_init(cpu_dev, nullptr);
    ggml_backend_t dev = ggml_backend_dev_init(sim_dev[0], nullptr);
    for (int n_threads : { 1, 2, 3 }) {
        const std::vector<float> expected = run_mixed(cpu, n_threads);
        bool                     finite   = expected.size() == 256 * 2 * 5 + 256 * 5;
        for (float v : expected) {
            finite = finite && std::isfinite(v);
        }
        check(finite, "mixed graph on the CPU, %d threads: %zu finite values", n_threads, expected.size());
        for (int mode = 0; mode <= 2; mode++) {
            hotmoe_sim_set_strict(mode, n_threads);
            reset_counters();
            check(equal(run_mixed(dev, n_threads), expected), "mixed graph on SIM0 equals it, %d threads, mode %d", n_threads, mode);
            check(counters().n_kernels == 23 && counters().n_graphs == 1 && counters().n_failed == 0 && (counters().n_deferred > 0) == (mode > 0),
                  "  %d kernels, %d operations deferred", (int) counters().n_kernels, (int) counters().n_deferred);
        }
    }
    hotmoe_sim_set_strict(0, 1);

    for (int n_threads : { 1, 2, 3 }) {
        check(equal(run_attention(dev, n_threads), run_attention(cpu, n_threads)), "long attention of one token equals the CPU's, %d threads", n_threads);
    }
    check(!equal(run_attention(cpu, 1), run_attention(cpu, 3)), "and depends on the number of threads");

    const std::vector<float> fused = run_norm(cpu);
    check(equal(run_norm(dev), fused) && all_are(fused, 5.0f), "operations are fused when the CPU would: an intermediate result is left out");

    check(!equal(run_mixed(dev, 1, 8), run_mixed(cpu, 1)), "other weights give other values");
    check(!equal(run_mixed(dev, 1, 7, true), run_mixed(cpu, 1)), "two slots swapped give other values");
    ggml_backend_free(dev);
    ggml_backend_free(cpu);
}

// scheduler: experts in host memory, the rest wherever
static void run_sched(int n_tokens, int64_t n_used, std::vector<float> & result) {
    const int64_t  n_embd = 64, n_expert = 8;
    ggml_backend_t backends[] = { ggml_backend_dev_init(sim_dev[0], nullptr), ggml_backend_dev_init(cpu_dev, nullptr) };

    tensors       w;
    ggml_tensor * experts = ggml_new_tensor_3d(w.ctx, GGML_TYPE_Q8_0, n_embd, n_embd, n_expert);
    w.alloc(ggml_backend_cpu_buffer_type(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    fill(experts, 5);

    tensors       g;
    ggml_tensor * x   = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, n_embd, 1, n_tokens);
    ggml_tensor * ids = ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, 1, n_tokens);
    ggml_set_input(x);
    ggml_set_input(ids);
    ggml_tensor * y = ggml_mul_mat_id(g.ctx, experts, x, ids);
    ggml_set_output(y);
    ggml_cgraph * graph = graph_of(g, y);

    ggml_backend_sched_t sched = ggml_backend_sched_new(backends, nullptr, 2, 256, false, true);
    ggml_backend_sched_alloc_graph(sched, graph);
    fill(x, 6);
    std::vector<int32_t> v(n_tokens);
    for (int i = 0; i < n_tokens; i++) {
        v[i] = i % n_used;
    }
    set(ids, v);
    set_threads(backends[0], 1);
    set_threads(backends[1], 1);
    reset_counters();
    check(ggml_backend_sched_graph_compute(sched, graph) == GGML_STATUS_SUCCESS, "  scheduler computes");
    result = get(y);
    ggml_backend_sched_free(sched);
    ggml_backend_free(backends[0]);
    ggml_backend_free(backends[1]);
}

static void test_sched() {
    const size_t expert_bytes = 64 * ggml_row_size(GGML_TYPE_Q8_0, 64);
    for (int mode = 0; mode <= 2; mode++) {
        hotmoe_sim_set_strict(mode, 1);
        std::vector<float> host, device;
        run_sched(31, 3, host);
        check(counters().n_kernels == 0 && counters().h2d_bytes == 0, "mode %d, 31 tokens: experts in host memory are computed on the CPU", mode);
        run_sched(32, 3, device);
        check(counters().n_kernels == 1, "mode %d, 32 tokens: offloaded to SIM0", mode);
        const size_t inputs = 32 * 64 * 4 + 32 * 4;
        // the copy of a run of experts is 512 bytes longer
        check(counters().h2d_bytes == 3 * expert_bytes + 512 + inputs, "  only the 3 used experts are copied (%d bytes)", (int) counters().h2d_bytes);
        check(host.size() == 31 * 64 && device.size() == 32 * 64 && memcmp(host.data(), device.data(), host.size() * sizeof(float)) == 0, "  and the values are those of the CPU");
    }
    hotmoe_sim_set_strict(0, 1);
}

// ordering

static void test_async_source() {
    ggml_backend_t dev = ggml_backend_dev_init(sim_dev[0], nullptr);
    tensors        t;
    ggml_tensor *  x = t.f32(256);
    t.alloc(dev);

    auto run = [&](bool overwrite_early) {
        std::vector<float> source(256, 1.0f);
        ggml_backend_tensor_set_async(dev, x, source.data(), 0, ggml_nbytes(x));
        if (overwrite_early) {
            source.assign(256, 2.0f);
        }
        ggml_backend_synchronize(dev);
        source.assign(256, 3.0f);
        return get(x);
    };
    for (int mode = 0; mode <= 2; mode++) {
        hotmoe_sim_set_strict(mode, 1);
        check(all_are(run(false), 1.0f), "mode %d: source kept until synchronised: right", mode);
    }
    hotmoe_sim_set_strict(0, 1);
    check(all_are(run(true), 1.0f), "mode 0: source overwritten early: not noticed");
    hotmoe_sim_set_strict(1, 1);
    check(all_are(run(true), 2.0f), "mode 1: source overwritten early: caught");
    int caught = 0;
    for (int seed = 0; seed < N_SEEDS; seed++) {
        hotmoe_sim_set_strict(2, seed);
        caught += all_are(run(true), 2.0f);
    }
    check(caught > 0, "mode 2: source overwritten early: caught with %d of %d seeds", caught, N_SEEDS);

    // the other direction
    auto read_before_sync = [&](bool sync) {
        std::vector<float> target(256, 5.0f);
        ggml_backend_tensor_get_async(dev, x, target.data(), 0, ggml_nbytes(x));
        if (sync) {
            ggml_backend_synchronize(dev);
        }
        const std::vector<float> seen = target;
        ggml_backend_synchronize(dev);
        return seen;
    };
    hotmoe_sim_set_strict(0, 1);
    set(x, std::vector<float>(256, 4.0f));
    check(all_are(read_before_sync(false), 4.0f), "mode 0: result read before synchronising: not noticed");
    hotmoe_sim_set_strict(1, 1);
    check(all_are(read_before_sync(false), 5.0f), "mode 1: result read before synchronising: caught");
    check(all_are(read_before_sync(true), 4.0f), "mode 1: result read after synchronising: right");

    // a synchronous access does not wait for the stream
    auto set_without_sync = [&](bool sync) {
        tensors       g;
        ggml_tensor * y = ggml_scale(g.ctx, x, 2.0f);
        g.alloc(dev);
        set(x, std::vector<float>(256, 4.0f));
        ggml_backend_graph_compute_async(dev, graph_of(g, y));
        if (sync) {
            ggml_backend_synchronize(dev);
        }
        set(x, std::vector<float>(256, 10.0f));
        ggml_backend_synchronize(dev);
        return get(y);
    };
    check(all_are(set_without_sync(false), 20.0f), "mode 1: operand overwritten by a synchronous set: caught");
    check(all_are(set_without_sync(true), 8.0f), "mode 1: with synchronising before: right");
    hotmoe_sim_set_strict(0, 1);
    check(all_are(set_without_sync(false), 8.0f), "mode 0: operand overwritten by a synchronous set: not noticed");

    // strided copies
    const std::vector<float> source = random_floats(256, 3);
    for (int mode = 0; mode <= 2; mode++) {
        hotmoe_sim_set_strict(mode, 1);
        ggml_backend_buffer_clear(t.buffer, 0);
        ggml_backend_tensor_set_2d_async(dev, x, source.data(), 16, 8, 3, 64, 32); // 3 pieces of 2 floats
        std::vector<float> back(8, -1.0f);
        ggml_backend_tensor_get_2d_async(dev, x, back.data(), 16, 8, 3, 64, 12);
        ggml_backend_synchronize(dev);
        check(back[0] == source[0] && back[1] == source[1] && back[2] == -1.0f && back[3] == source[8] && back[4] == source[9] &&
                  back[6] == source[16] && back[7] == source[17] && get(x)[6] == 0.0f && get(x)[20] == source[8],
              "mode %d: strided copies", mode);
    }
    hotmoe_sim_set_strict(0, 1);
    ggml_backend_free(dev);
}

// Four streams on two devices: an upload, two dependent graphs on different streams, a copy to the other device, a graph
// there, and two ways for the host to wait.
struct pipeline {
    ggml_backend_t       upload, first, second, third;
    ggml_backend_event_t uploaded, computed, finished;
    tensors              mem0, mem1;
    ggml_tensor *        x, *y, *z, *z1, *q;
    ggml_cgraph *        graph_y, *graph_z, *graph_q;

    // given back only when the streams are gone, since a dropped synchronisation leaves copies behind
    std::vector<float> source, by_sync, by_event;

    bool wait_for_upload = true;

    pipeline() {
        upload   = ggml_backend_dev_init(sim_dev[0], nullptr);
        first    = ggml_backend_dev_init(sim_dev[0], nullptr);
        second   = ggml_backend_dev_init(sim_dev[0], nullptr);
        third    = ggml_backend_dev_init(sim_dev[1], nullptr);
        uploaded = ggml_backend_event_new(sim_dev[0]);
        computed = ggml_backend_event_new(sim_dev[0]);
        finished = ggml_backend_event_new(sim_dev[1]);
        x        = mem0.f32(512);
        y        = ggml_scale(mem0.ctx, x, 2.0f);
        z        = ggml_add(mem0.ctx, y, y);
        z1       = mem1.f32(512);
        q        = ggml_scale(mem1.ctx, z1, 3.0f);
        mem0.alloc(first);
        mem1.alloc(third);
        graph_y = ggml_graph_view_of(mem0, y);
        graph_z = ggml_graph_view_of(mem0, z);
        graph_q = ggml_graph_view_of(mem1, q);
        source.assign(512, 1.0f);
        by_sync.assign(512, -1.0f);
        by_event.assign(512, -1.0f);
    }
    ~pipeline() {
        for (ggml_backend_t b : { upload, first, second, third }) {
            ggml_backend_free(b);
        }
        for (ggml_backend_event_t e : { uploaded, computed, finished }) {
            ggml_backend_event_free(e);
        }
    }

    // a graph with this one node, its operands being there already
    static ggml_cgraph * ggml_graph_view_of(tensors & t, ggml_tensor * node) {
        ggml_cgraph * graph = ggml_new_graph_custom(t.ctx, GRAPH_SIZE, false);
        node->flags        |= GGML_TENSOR_FLAG_COMPUTE;
        ggml_graph_add_node(graph, node);
        return graph;
    }

    // 12 everywhere in both results, if everything is ordered
    std::vector<float> run() {
        const size_t n = 512 * sizeof(float);
        ggml_backend_tensor_set_async(upload, x, source.data(), 0, n);
        ggml_backend_event_record(uploaded, upload);
        if (wait_for_upload) {
            ggml_backend_event_wait(first, uploaded);
        }
        ggml_backend_graph_compute_async(first, graph_y);
        ggml_backend_event_record(computed, first);
        ggml_backend_event_wait(second, computed);
        ggml_backend_graph_compute_async(second, graph_z);
        ggml_backend_tensor_copy_async(second, third, z, z1);
        ggml_backend_graph_compute_async(third, graph_q);

        ggml_backend_tensor_get_async(third, q, by_event.data(), 0, n);
        ggml_backend_event_record(finished, third);
        ggml_backend_event_synchronize(finished);
        std::vector<float> seen = by_event;

        ggml_backend_tensor_get_async(third, q, by_sync.data(), 0, n);
        ggml_backend_synchronize(third);
        seen.insert(seen.end(), by_sync.begin(), by_sync.end());
        return seen;
    }
};

static bool pipeline_is_right(bool wait_for_upload = true) {
    pipeline p;
    p.wait_for_upload = wait_for_upload;
    return all_are(p.run(), 12.0f);
}

static void test_streams() {
    // in mode 1 nothing runs but what the host waits for
    hotmoe_sim_set_strict(1, 1);
    {
        ggml_backend_t       a     = ggml_backend_dev_init(sim_dev[0], nullptr);
        ggml_backend_t       b     = ggml_backend_dev_init(sim_dev[0], nullptr);
        ggml_backend_event_t event = ggml_backend_event_new(sim_dev[0]);
        tensors              t;
        ggml_tensor *        x = t.f32(16);
        t.alloc(a);
        set(x, std::vector<float>(16, 0.0f));
        const std::vector<float> one(16, 1.0f), two(16, 2.0f);
        ggml_backend_tensor_set_async(a, x, one.data(), 0, ggml_nbytes(x));
        ggml_backend_event_record(event, a);
        ggml_backend_tensor_set_async(a, x, two.data(), 0, ggml_nbytes(x));
        ggml_backend_synchronize(b);
        check(all_are(get(x), 0.0f), "mode 1: synchronising another backend runs nothing of this one");
        ggml_backend_event_synchronize(event);
        check(all_are(get(x), 1.0f), "mode 1: an event covers what was submitted before it, no more");
        ggml_backend_synchronize(a);
        check(all_are(get(x), 2.0f), "mode 1: synchronising a backend runs all of it");
        ggml_backend_event_free(event);
        ggml_backend_free(a);
        ggml_backend_free(b);
    }

    hotmoe_sim_set_strict(0, 1);
    check(pipeline_is_right(), "mode 0: four streams on two devices");
    check(pipeline_is_right(false), "mode 0: missing event wait: not noticed");
    hotmoe_sim_set_strict(1, 1);
    check(pipeline_is_right(), "mode 1: four streams on two devices");
    check(!pipeline_is_right(false), "mode 1: missing event wait: caught");
    int right = 0, caught = 0;
    for (int seed = 0; seed < N_SEEDS; seed++) {
        hotmoe_sim_set_strict(2, seed);
        right  += pipeline_is_right();
        caught += !pipeline_is_right(false);
    }
    check(right == N_SEEDS, "mode 2: four streams on two devices, right with %d of %d seeds", right, N_SEEDS);
    check(caught > 0, "mode 2: missing event wait: caught with %d of %d seeds", caught, N_SEEDS);

    // the same seed takes the same course
    std::vector<bool> a, b;
    for (std::vector<bool> * v : { &a, &b }) {
        for (int seed = 0; seed < N_SEEDS; seed++) {
            hotmoe_sim_set_strict(2, seed);
            v->push_back(pipeline_is_right(false));
        }
    }
    check(a == b, "mode 2: reproducible by its seed");
    hotmoe_sim_set_strict(0, 1);
}

static void test_faults() {
    const struct {
        int          fault;
        const char * name;
    } faults[] = {
        { HOTMOE_SIM_FAULT_DROP_EVENT_WAIT, "dropped event wait" },
        { HOTMOE_SIM_FAULT_DROP_SYNCHRONIZE, "dropped synchronize" },
        { HOTMOE_SIM_FAULT_DROP_EVENT_SYNCHRONIZE, "dropped event synchronize" },
        { HOTMOE_SIM_FAULT_DROP_COPY_WAIT, "dropped copy wait" },
    };
    for (const auto & f : faults) {
        hotmoe_sim_set_fault(f.fault);
        hotmoe_sim_set_strict(0, 1);
        reset_counters();
        check(pipeline_is_right() && counters(0).n_faults + counters(1).n_faults > 0, "mode 0: %s: changes nothing", f.name);
        hotmoe_sim_set_strict(1, 1);
        check(!pipeline_is_right(), "mode 1: %s: caught", f.name);
        int caught = 0;
        for (int seed = 0; seed < N_SEEDS; seed++) {
            hotmoe_sim_set_strict(2, seed);
            caught += !pipeline_is_right();
        }
        check(caught > 0, "mode 2: %s: caught with %d of %d seeds", f.name, caught, N_SEEDS);
    }
    check(hotmoe_sim_set_fault(5) == HOTMOE_SIM_ERR_ARGUMENT, "unknown fault refused");
    hotmoe_sim_set_fault(HOTMOE_SIM_FAULT_NONE);
    hotmoe_sim_set_strict(1, 1);
    check(pipeline_is_right(), "mode 1: right again without a fault");
    hotmoe_sim_set_strict(0, 1);
}

static void test_counters() {
    for (int mode = 0; mode <= 2; mode++) {
        hotmoe_sim_set_strict(mode, 1);
        reset_counters();
        {
            pipeline p;
            p.run();
            ggml_backend_tensor_set(p.x, p.source.data(), 0, 100);
            ggml_backend_tensor_get(p.z, p.by_sync.data(), 0, 60);
            ggml_backend_tensor_copy(p.z, p.y);
        }
        const hotmoe_sim_counters a = counters(0);
        const hotmoe_sim_counters b = counters(1);
        check(a.h2d_bytes == 2048 + 100 && a.n_h2d == 2 && a.d2h_bytes == 60 && a.n_d2h == 1 && a.d2d_bytes == 2048 && a.n_d2d == 1, "mode %d: copies of SIM0", mode);
        check(b.h2d_bytes == 0 && b.d2h_bytes == 4096 && b.n_d2h == 2 && b.d2d_bytes == 2048 && b.n_d2d == 1, "mode %d: copies of SIM1", mode);
        check(a.n_graphs == 2 && a.n_kernels == 2 && b.n_graphs == 1 && b.n_kernels == 1 && a.n_sync == 0 && b.n_sync == 2, "mode %d: graphs, kernels, syncs", mode);
        check(a.peak_bytes == 3 * 2048 && b.peak_bytes == 2 * 2048 && a.allocated_bytes == 0 && a.n_failed + b.n_failed + a.n_faults == 0, "mode %d: memory", mode);
    }
    hotmoe_sim_set_strict(0, 1);

    hotmoe_sim_counters small = {};
    small.struct_size         = 16;
    small.d2h_bytes           = 77;
    hotmoe_sim_get_counters(0, &small);
    check(small.h2d_bytes == 2148 && small.d2h_bytes == 77, "counters: a smaller struct gets only its fields");
}

static void test_refusals() {
    ggml_backend_t dev = ggml_backend_dev_init(sim_dev[0], nullptr);
    tensors        host, device, other;
    ggml_tensor *  xh  = ggml_set_name(host.f32(256), "x_host");
    ggml_tensor *  xo  = other.f32(256);
    ggml_tensor *  xd  = device.f32(256);
    ggml_tensor *  ids = ggml_new_tensor_2d(device.ctx, GGML_TYPE_I32, 2, 1);
    ggml_tensor *  w   = ggml_new_tensor_3d(device.ctx, GGML_TYPE_F32, 256, 4, 3);
    host.alloc(ggml_backend_cpu_buffer_type());
    other.alloc(ggml_backend_dev_buffer_type(sim_dev[1]));
    ggml_tensor * y_host  = ggml_scale(device.ctx, xh, 2.0f);
    ggml_tensor * y_other = ggml_scale(device.ctx, xo, 2.0f);
    ggml_tensor * y_ok    = ggml_scale(device.ctx, xd, 2.0f);
    ggml_tensor * y_ids   = ggml_mul_mat_id(device.ctx, w, ggml_reshape_3d(device.ctx, xd, 256, 1, 1), ids);
    auto          custom  = [](ggml_tensor *, const ggml_tensor *, int, int, void *) {};
    ggml_tensor * y_bad   = ggml_map_custom1(device.ctx, xd, custom, 1, nullptr);
    ggml_tensor * y_sort  = ggml_argsort(device.ctx, xd, GGML_SORT_ORDER_DESC);
    device.alloc(dev);

    auto status = [&](ggml_tensor * node) {
        log_text.clear();
        return ggml_backend_graph_compute(dev, graph_of(device, node));
    };
    reset_counters();
    check_log(status(y_host) == GGML_STATUS_FAILED && log_has("x_host") && log_has("CPU"), "operand in host memory");
    check_log(status(y_other) == GGML_STATUS_FAILED && log_has("SIM1"), "operand on another device");
    check_log(status(y_bad) == GGML_STATUS_FAILED && log_has("cannot compute"), "operation that is not supported");
    check_log(status(y_sort) == GGML_STATUS_FAILED && log_has("NaN"), "NaN to be sorted");
    check(counters().n_failed == 4 && counters().n_graphs == 1, "refused graphs are counted as failed");
    fill(xd, 1);
    fill(w, 2);
    check(status(y_ok) == GGML_STATUS_SUCCESS && status(y_sort) == GGML_STATUS_SUCCESS, "the next graph is fine");

    check_log(status(y_ids) == GGML_STATUS_FAILED && log_has("index -1"), "poisoned ids");
    set<int32_t>(ids, { 1, 3 });
    check(status(y_ids) == GGML_STATUS_FAILED && log_has("index 3"), "id out of range");
    set<int32_t>(ids, { 2, 0 });
    check(status(y_ids) == GGML_STATUS_SUCCESS && counters().n_dup_ids == 0, "legal ids");
    set<int32_t>(ids, { 2, 2 });
    check(status(y_ids) == GGML_STATUS_SUCCESS && counters().n_dup_ids == 1, "the same id twice for a token is counted");

    // late work cannot fail in the call that submitted it
    hotmoe_sim_set_strict(1, 1);
    set<int32_t>(ids, { 2, -1 });
    check(status(y_ids) == GGML_STATUS_SUCCESS && status(y_ok) == GGML_STATUS_FAILED && status(y_ok) == GGML_STATUS_SUCCESS, "mode 1: a failure is reported by the next graph");
    hotmoe_sim_set_strict(0, 1);

    {
        tensors       gone;
        ggml_tensor * xg = ggml_set_name(gone.f32(256), "x_gone");
        gone.alloc(dev);
        tensors       user;
        ggml_tensor * y = ggml_scale(user.ctx, xg, 2.0f);
        user.alloc(dev);
        ggml_cgraph * graph = graph_of(user, y);
        ggml_backend_buffer_free(gone.buffer);
        gone.buffer = nullptr;
        log_text.clear();
        check_log(ggml_backend_graph_compute(dev, graph) == GGML_STATUS_FAILED && log_has("was freed"), "operand in freed memory");
    }

    log_text.clear();
    float value = 1.0f;
    ggml_backend_tensor_set_async(dev, xo, &value, 0, sizeof(value));
    check(log_has("not in the memory") && status(y_ok) == GGML_STATUS_FAILED && status(y_ok) == GGML_STATUS_SUCCESS, "asynchronous set of another device's tensor refused");
    ggml_backend_free(dev);
}

static void test_lifetimes() {
    hotmoe_sim_set_strict(1, 1);
    reset_counters();
    ggml_backend_t dev = ggml_backend_dev_init(sim_dev[0], nullptr);
    tensors        keep;
    ggml_tensor *  y = keep.f32(256);
    keep.alloc(dev);
    {
        // tensors and graph are freed while queued; so is the memory, which a device would be using
        tensors       gone;
        ggml_tensor * x = gone.f32(256);
        gone.alloc(dev);
        set(x, std::vector<float>(256, 3.0f));
        tensors       g;
        ggml_tensor * c = ggml_cpy(g.ctx, x, y);
        ggml_backend_view_init(c);
        ggml_backend_graph_compute_async(dev, graph_of(g, c));
    }
    check(counters().n_late_frees == 1, "memory freed while queued work uses it is counted");
    ggml_backend_synchronize(dev);
    check(all_are(get(y), 3.0f) && counters().n_failed == 0, "and the work still gives its result");

    // an event outlives its stream
    ggml_backend_t       short_lived = ggml_backend_dev_init(sim_dev[0], nullptr);
    ggml_backend_event_t event       = ggml_backend_event_new(sim_dev[0]);
    ggml_backend_event_synchronize(event);
    std::vector<float> source(256, 4.0f);
    ggml_backend_tensor_set_async(short_lived, y, source.data(), 0, ggml_nbytes(y));
    ggml_backend_event_record(event, short_lived);
    ggml_backend_free(short_lived);
    ggml_backend_event_wait(dev, event);
    ggml_backend_event_synchronize(event);
    ggml_backend_synchronize(dev);
    check(all_are(get(y), 4.0f), "an event of a stream that was freed counts as reached");
    ggml_backend_event_free(event);
    ggml_backend_free(dev);
    check(counters().n_late_frees == 1 && free_bytes(0) == CAPACITY - 1024, "nothing else was late");
    hotmoe_sim_set_strict(0, 1);
}

static void test_threads() {
    ggml_backend_t           cpu      = ggml_backend_dev_init(cpu_dev, nullptr);
    const std::vector<float> expected = run_mixed(cpu, 1);
    ggml_backend_free(cpu);
    for (int mode = 0; mode <= 2; mode++) {
        hotmoe_sim_set_strict(mode, 1);
        int                      right[2] = { 0, 0 };
        std::vector<std::thread> threads;
        for (int i = 0; i < 2; i++) {
            threads.emplace_back([&, i] {
                ggml_backend_t dev = ggml_backend_dev_init(sim_dev[0], nullptr);
                for (int k = 0; k < 10; k++) {
                    right[i] += equal(run_mixed(dev, 1), expected);
                }
                ggml_backend_free(dev);
            });
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
        check(right[0] == 10 && right[1] == 10, "mode %d: two backends of one device in two threads", mode);
    }
    hotmoe_sim_set_strict(0, 1);
}

// In a process of its own: loaded through GGML_BACKEND_PATH, with nothing configured.
static int run_default() {
    ggml_backend_load_all();
    ggml_backend_dev_t dev = ggml_backend_dev_by_name("SIM0");
    if (!dev || ggml_backend_dev_by_name("SIM1")) {
        return 2;
    }
    size_t free, total;
    ggml_backend_dev_memory(dev, &free, &total);
    return total == 1024 * MiB && free == total ? 0 : 3;
}

static void test_default(const char * self) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        setenv("GGML_BACKEND_PATH", module_path().c_str(), 1);
        execl("/proc/self/exe", self, "--default", (char *) nullptr);
        _exit(9);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "GGML_BACKEND_PATH alone: one device of 1 GiB");
}

int main(int argc, char ** argv) {
    if (argc > 1 && strcmp(argv[1], "--default") == 0) {
        return run_default();
    }
    ggml_log_set(log_callback, nullptr);

    test_default(argv[0]);
    test_config_errors();
    if (test_presence()) {
        test_memory();
        test_supports_op();
        test_equality();
        test_sched();
        test_async_source();
        test_streams();
        test_faults();
        test_counters();
        test_refusals();
        test_lifetimes();
        test_threads();
    }

    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}
