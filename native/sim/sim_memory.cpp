#include "sim_memory.h"

#include "sim_stream.h"

#include "ggml-impl.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>

static const uint8_t SIM_POISON         = 0xFF; // NaN as floating point, -1 as integer
static const size_t  SIM_MAX_FREED      = 256;  // fake ranges remembered after free, per device
static const size_t  SIM_ALIGNMENT      = 128;  // bytes, as CUDA's buffers
static const int64_t SIM_MATRIX_ROW_PAD = 512;  // elements, as CUDA's MATRIX_ROW_PADDING

// mapping

static size_t sim_page_round(size_t size) {
    const size_t page = (size_t) sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

static uint8_t * sim_map(size_t size, int prot) {
    void * ptr = mmap(nullptr, size, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return ptr == MAP_FAILED ? nullptr : (uint8_t *) ptr;
}

ggml_backend_buffer_t sim_tensor_buffer(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

uint8_t * sim_translate(sim_device & device, const void * ptr, size_t size, sim_alloc * alloc) {
    std::lock_guard<std::mutex> lock(device.mutex);
    auto                        it = device.allocs.upper_bound((uintptr_t) ptr);
    if (it == device.allocs.begin()) {
        return nullptr;
    }
    const sim_alloc & a      = std::prev(it)->second;
    const size_t      offset = (const uint8_t *) ptr - a.fake;
    if (offset > a.size || size > a.size - offset) {
        return nullptr;
    }
    if (alloc) {
        *alloc = a;
    }
    return a.real + offset;
}

bool sim_is_freed(sim_device & device, const void * ptr) {
    std::lock_guard<std::mutex> lock(device.mutex);
    for (const sim_alloc & a : device.freed) {
        if (ptr >= a.fake && ptr < a.fake + a.pages) {
            return true;
        }
    }
    return false;
}

// device buffer
//
// The synchronous accesses below happen at once and wait for nobody. That is what CUDA guarantees, and no more: its buffer
// functions copy on cudaStreamPerThread and synchronise that stream, while backends run on streams of their own, created
// as non-blocking, so that neither waits for the other. Whoever reads a result or overwrites an operand this way must have
// synchronised the backend first.

struct sim_buffer {
    sim_device * device;
    sim_alloc    alloc;
};

static uint8_t * sim_buffer_real(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, size_t offset) {
    sim_buffer * ctx = (sim_buffer *) buffer->context;
    return ctx->alloc.real + ((const uint8_t *) tensor->data - ctx->alloc.fake) + offset;
}

static sim_device & sim_device_of_buffer(ggml_backend_buffer_t buffer) {
    return *((sim_buffer *) buffer->context)->device;
}

static void sim_buffer_free(ggml_backend_buffer_t buffer) {
    sim_buffer * ctx    = (sim_buffer *) buffer->context;
    sim_device & device = *ctx->device;
    sim_alloc    alloc  = ctx->alloc;
    delete ctx;

    if (sim_finish_uses(alloc.real, alloc.size)) {
        device.counters.n_late_frees++;
    }

    sim_alloc forget = {};
    {
        std::lock_guard<std::mutex> lock(device.mutex);
        device.allocs.erase((uintptr_t) alloc.fake);
        device.allocated -= alloc.size;
        device.freed.push_back(alloc);
        if (device.freed.size() > SIM_MAX_FREED) {
            forget = device.freed.front();
            device.freed.pop_front();
        }
    }
    if (forget.fake) {
        munmap(forget.fake, forget.pages);
    }
    ggml_backend_buffer_free(alloc.inner);
    munmap(alloc.real, alloc.pages);
}

static void * sim_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((sim_buffer *) buffer->context)->alloc.fake;
}

static void sim_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    sim_progress();
    memset(sim_buffer_real(buffer, tensor, offset), value, size);
}

static enum ggml_status sim_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    if (ggml_is_quantized(tensor->type) && buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        // as in CUDA: the padding of the last row is read by matrix kernels and must not be NaN
        const size_t nbytes = ggml_nbytes(tensor);
        const size_t padded = ggml_backend_buft_get_alloc_size(buffer->buft, tensor);
        if (padded > nbytes) {
            memset(sim_buffer_real(buffer, tensor, nbytes), 0, padded - nbytes);
        }
    }
    return GGML_STATUS_SUCCESS;
}

static void sim_buffer_set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                                     size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data) {
    sim_charge(sim_device_of_buffer(buffer), SIM_WORK_H2D, size * n_copies);
    sim_progress();
    for (size_t i = 0; i < n_copies; i++) {
        memcpy(sim_buffer_real(buffer, tensor, offset + i * stride_tensor), (const uint8_t *) data + i * stride_data, size);
    }
}

static void sim_buffer_get_tensor_2d(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                                     size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data) {
    sim_charge(sim_device_of_buffer(buffer), SIM_WORK_D2H, size * n_copies);
    sim_progress();
    for (size_t i = 0; i < n_copies; i++) {
        memcpy((uint8_t *) data + i * stride_data, sim_buffer_real(buffer, tensor, offset + i * stride_tensor), size);
    }
}

static void sim_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    sim_buffer_set_tensor_2d(buffer, tensor, data, offset, size, 1, 0, 0);
}

static void sim_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    sim_buffer_get_tensor_2d(buffer, tensor, data, offset, size, 1, 0, 0);
}

static bool sim_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    ggml_backend_buffer_t src_buffer = sim_tensor_buffer(src);
    if (!sim_buffer_device(src_buffer)) {
        return false;
    }
    sim_charge(sim_device_of_buffer(buffer), SIM_WORK_D2D, ggml_nbytes(src));
    sim_progress();
    memcpy(sim_buffer_real(buffer, dst, 0), sim_buffer_real(src_buffer, src, 0), ggml_nbytes(src));
    return true;
}

static void sim_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    sim_buffer * ctx = (sim_buffer *) buffer->context;
    sim_progress();
    memset(ctx->alloc.real, value, ctx->alloc.size);
}

static const ggml_backend_buffer_i sim_buffer_iface = {
    /* .free_buffer     = */ sim_buffer_free,
    /* .get_base        = */ sim_buffer_get_base,
    /* .init_tensor     = */ sim_buffer_init_tensor,
    /* .memset_tensor   = */ sim_buffer_memset_tensor,
    /* .set_tensor      = */ sim_buffer_set_tensor,
    /* .get_tensor      = */ sim_buffer_get_tensor,
    /* .set_tensor_2d   = */ sim_buffer_set_tensor_2d,
    /* .get_tensor_2d   = */ sim_buffer_get_tensor_2d,
    /* .cpy_tensor      = */ sim_buffer_cpy_tensor,
    /* .clear           = */ sim_buffer_clear,
    /* .reset           = */ NULL,
};

sim_device * sim_buffer_device(ggml_backend_buffer_t buffer) {
    if (!buffer || buffer->iface.free_buffer != sim_buffer_free) {
        return nullptr;
    }
    return ((sim_buffer *) buffer->context)->device;
}

// device buffer type

static const char * sim_buft_get_name(ggml_backend_buffer_type_t buft) {
    return sim_device_of(buft->device).name.c_str();
}

// Takes `size` bytes of the device's capacity and maps them; false and nothing taken if there is not enough.
static bool sim_allocate(sim_device & device, size_t size, sim_alloc & alloc) {
    {
        std::lock_guard<std::mutex> lock(device.mutex);
        const size_t                available = device.capacity - device.allocated;
        if (size > available) {
            GGML_LOG_ERROR("sim: %s: out of memory: %zu bytes asked for, %zu of %zu available\n",
                           device.name.c_str(), size, available, device.capacity);
            return false;
        }
        device.allocated += size;
        device.peak       = std::max(device.peak, device.allocated);
    }

    alloc.size  = size;
    alloc.pages = sim_page_round(size);
    alloc.fake  = sim_map(alloc.pages, PROT_NONE);
    alloc.real  = sim_map(alloc.pages, PROT_READ | PROT_WRITE);
    if (alloc.fake && alloc.real) {
        return true;
    }

    GGML_LOG_ERROR("sim: %s: the host has no %zu bytes for device memory\n", device.name.c_str(), size);
    if (alloc.fake) {
        munmap(alloc.fake, alloc.pages);
    }
    if (alloc.real) {
        munmap(alloc.real, alloc.pages);
    }
    std::lock_guard<std::mutex> lock(device.mutex);
    device.allocated -= size;
    return false;
}

static ggml_backend_buffer_t sim_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    sim_device & device = sim_device_of(buft->device);
    sim_alloc    alloc;
    if (!sim_allocate(device, size, alloc)) {
        return nullptr;
    }
    if (sim().poison) {
        memset(alloc.real, SIM_POISON, alloc.pages);
    }
    try {
        alloc.inner = ggml_backend_cpu_buffer_from_ptr(alloc.real, alloc.pages);
        std::lock_guard<std::mutex> lock(device.mutex);
        device.allocs[(uintptr_t) alloc.fake] = alloc;
        return ggml_backend_buffer_init(buft, sim_buffer_iface, new sim_buffer { &device, alloc }, size);
    } catch (const std::exception & e) {
        GGML_LOG_ERROR("sim: %s: %s\n", device.name.c_str(), e.what());
        return nullptr;
    }
}

static size_t sim_buft_get_alignment(ggml_backend_buffer_type_t buft) {
    return SIM_ALIGNMENT;

    GGML_UNUSED(buft);
}

// As CUDA's, so that a plan made here fits there, except for the workspace that its flash attention appends.
static size_t sim_buft_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    size_t size = ggml_nbytes(tensor);
    if (ggml_is_quantized(tensor->type) && tensor->ne[0] % SIM_MATRIX_ROW_PAD != 0) {
        size += ggml_row_size(tensor->type, SIM_MATRIX_ROW_PAD - tensor->ne[0] % SIM_MATRIX_ROW_PAD);
    }
    return size;

    GGML_UNUSED(buft);
}

void sim_init_buffer_type(sim_device & device) {
    device.buft = {
        /* .iface   = */ {
            /* .get_name       = */ sim_buft_get_name,
            /* .alloc_buffer   = */ sim_buft_alloc_buffer,
            /* .get_alignment  = */ sim_buft_get_alignment,
            /* .get_max_size   = */ NULL,
            /* .get_alloc_size = */ sim_buft_get_alloc_size,
            /* .is_host        = */ NULL,
        },
        /* .device  = */ &device.dev,
        /* .context = */ &device,
    };
}

// pinned host memory

static bool sim_pin(size_t size) {
    sim_state &    state = sim();
    const uint64_t limit = state.host_pinned_limit;
    const uint64_t now   = state.host_pinned.fetch_add(size) + size;
    if (limit != 0 && now > limit) {
        state.host_pinned -= size;
        GGML_LOG_DEBUG("sim: %zu bytes would exceed the limit of %llu bytes of pinned memory\n", size, (unsigned long long) limit);
        return false;
    }
    return true;
}

static const char * sim_host_buft_get_name(ggml_backend_buffer_type_t buft) {
    return "SIM_Host";

    GGML_UNUSED(buft);
}

static void sim_host_buffer_free(ggml_backend_buffer_t buffer) {
    if (sim_finish_uses((uint8_t *) buffer->context, buffer->size)) {
        sim_device_of(buffer->buft->device).counters.n_late_frees++;
    }
    munmap(buffer->context, sim_page_round(buffer->size));
    sim().host_pinned -= buffer->size;
}

static ggml_backend_buffer_t sim_host_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    uint8_t * ptr = nullptr;
    if (sim_pin(size)) {
        ptr = sim_map(sim_page_round(size), PROT_READ | PROT_WRITE);
        if (!ptr) {
            sim().host_pinned -= size;
        }
    }
    if (!ptr) {
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    if (sim().poison) {
        memset(ptr, SIM_POISON, size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(ptr, size);
    buffer->buft                 = buft;
    buffer->iface.free_buffer    = sim_host_buffer_free;
    return buffer;
}

void sim_init_host_buffer_type(ggml_backend_buffer_type & buft, ggml_backend_dev_t dev) {
    const ggml_backend_buffer_type_i & cpu = ggml_backend_cpu_buffer_type()->iface;
    buft                                   = {
        /* .iface   = */ {
            /* .get_name       = */ sim_host_buft_get_name,
            /* .alloc_buffer   = */ sim_host_buft_alloc_buffer,
            /* .get_alignment  = */ cpu.get_alignment,
            /* .get_max_size   = */ NULL,
            /* .get_alloc_size = */ cpu.get_alloc_size,
            /* .is_host        = */ cpu.is_host,
        },
        /* .device  = */ dev,
        /* .context = */ nullptr,
    };
}

bool sim_register_host_buffer(void * ptr, size_t size) {
    sim_state &                 state = sim();
    std::lock_guard<std::mutex> lock(state.mutex);
    if (!ptr || size == 0 || state.host_registered.count(ptr) || !sim_pin(size)) {
        return false;
    }
    try {
        state.host_registered[ptr] = size;
    } catch (const std::exception &) {
        state.host_pinned -= size;
        return false;
    }
    return true;
}

void sim_unregister_host_buffer(void * ptr) {
    sim_state &                 state = sim();
    std::lock_guard<std::mutex> lock(state.mutex);
    auto                        it = state.host_registered.find(ptr);
    if (it != state.host_registered.end()) {
        state.host_pinned -= it->second;
        state.host_registered.erase(it);
    }
}
