#include "store/stream_buffer.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <filesystem>

#if defined(_WIN32)
#    include <windows.h>
#else
#    include <sys/mman.h>
#endif

void streamed_experts::add(const ggml_tensor * tensor, const char * path, uint64_t offset, uint64_t size) {
    // absolute: the working directory may change before the file is opened
    const std::string           whole = std::filesystem::absolute(path).string();
    std::lock_guard<std::mutex> lock(mutex);
    ranges[tensor] = { whole, offset, size };
}

const file_range * streamed_experts::find(const ggml_tensor * tensor) const {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  it = ranges.find(tensor);
    return it == ranges.end() ? nullptr : &it->second;
}

std::shared_ptr<reader_pool> streamed_experts::readers(int32_t n_threads, store_direct direct, std::string & error) {
    std::lock_guard<std::mutex>  lock(mutex);
    std::shared_ptr<reader_pool> pool = shared.lock();
    if (!pool) {
        reader_tuning tuning;
        tuning.in_place = true;
        pool            = reader_pool::create(n_threads, direct, reader_pool::TIMEOUT_MS, nullptr, error, tuning);
        shared          = pool;
    }
    return pool;
}

//
// the buffer
//

namespace {

struct reserved_addresses {
    void *           base = nullptr;
    size_t           size = 0;
    streamed_experts experts;
};

} // namespace

static void * reserve(size_t size) {
#if defined(_WIN32)
    return VirtualAlloc(nullptr, size, MEM_RESERVE, PAGE_NOACCESS);
#else
    void * base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
#endif
}

static void release(void * base, size_t size) {
#if defined(_WIN32)
    (void) size;
    VirtualFree(base, 0, MEM_RELEASE);
#else
    munmap(base, size);
#endif
}

static void buffer_free(ggml_backend_buffer_t buffer) {
    auto * reserved = (reserved_addresses *) buffer->context;
    release(reserved->base, reserved->size);
    delete reserved;
}

static void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return ((reserved_addresses *) buffer->context)->base;
}

// Nobody has business with the bytes here: whoever asks for them would get wrong ones.
static void refuse(const ggml_tensor * tensor) {
    GGML_LOG_ERROR("hotmoe: %s is streamed: its bytes are not in memory\n", tensor->name);
}

static void buffer_memset(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t, size_t, size_t) {
    refuse(tensor);
}

static void buffer_set(ggml_backend_buffer_t, ggml_tensor * tensor, const void *, size_t, size_t) {
    refuse(tensor);
}

static void buffer_get(ggml_backend_buffer_t, const ggml_tensor * tensor, void *, size_t, size_t) {
    refuse(tensor);
}

static void buffer_clear(ggml_backend_buffer_t, uint8_t) {}

static ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    void * base = reserve(size > 0 ? size : 1);
    if (!base) {
        GGML_LOG_ERROR("hotmoe: cannot reserve %zu bytes of addresses for streamed experts\n", size);
        return nullptr;
    }
    auto * reserved = new reserved_addresses;
    reserved->base  = base;
    reserved->size  = size > 0 ? size : 1;

    ggml_backend_buffer_i iface = {};
    iface.free_buffer           = buffer_free;
    iface.get_base              = buffer_get_base;
    iface.memset_tensor         = buffer_memset;
    iface.set_tensor            = buffer_set;
    iface.get_tensor            = buffer_get;
    iface.clear                 = buffer_clear;
    return ggml_backend_buffer_init(buft, iface, reserved, size);
}

static const char * type_name(ggml_backend_buffer_type_t) {
    return "hotmoe_stream";
}

static size_t type_alignment(ggml_backend_buffer_type_t) {
    return 64;
}

static bool type_is_host(ggml_backend_buffer_type_t) {
    return true;
}

ggml_backend_buffer_type_t stream_buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type t = {};
        t.iface.get_name           = type_name;
        t.iface.alloc_buffer       = type_alloc;
        t.iface.get_alignment      = type_alignment;
        t.iface.is_host            = type_is_host;
        t.device                   = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        return t;
    }();
    return &type;
}

streamed_experts * streamed_experts_of(const ggml_tensor * tensor) {
    ggml_backend_buffer_t buffer = tensor->buffer;
    return buffer && buffer->buft == stream_buffer_type() ? &((reserved_addresses *) buffer->context)->experts : nullptr;
}
