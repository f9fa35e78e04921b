// ggml's interface tables: backend (stream), device and registry.

#include "sim_device.h"
#include "sim_graph.h"
#include "sim_memory.h"
#include "sim_ops.h"
#include "sim_stream.h"

#include "ggml-impl.h"

#include <cstring>
#include <exception>

struct sim_backend {
    sim_device *                device;
    std::shared_ptr<sim_stream> stream;
    int                         n_threads;
};

static ggml_guid_t sim_guid() {
    static ggml_guid guid = { 0x68, 0x6f, 0x74, 0x6d, 0x6f, 0x65, 0x2d, 0x73, 0x69, 0x6d, 0x75, 0x6c, 0x61, 0x74, 0x6f, 0x72 };
    return &guid;
}

static sim_backend & sim_backend_of(ggml_backend_t backend) {
    return *(sim_backend *) backend->context;
}

static bool sim_is_sim(ggml_backend_t backend) {
    return backend && ggml_guid_matches(backend->guid, sim_guid());
}

// Functions without a result leave their failure for the next graph to report.
static void sim_refuse(sim_backend & ctx, const char * what, const char * name, const char * why) {
    GGML_LOG_ERROR("sim: %s: %s of '%s' refused: %s\n", ctx.device->name.c_str(), what, name, why);
    ctx.device->counters.n_failed++;
    int none = GGML_STATUS_SUCCESS;
    ctx.stream->status.compare_exchange_strong(none, GGML_STATUS_FAILED);
}

// backend

static const char * sim_backend_get_name(ggml_backend_t backend) {
    return sim_backend_of(backend).device->name.c_str();
}

static void sim_backend_free(ggml_backend_t backend) {
    sim_stream_close(sim_backend_of(backend).stream);
    delete &sim_backend_of(backend);
    delete backend;
}

// Queues a copy between host memory and a tensor of the backend's device.
static void sim_host_copy(ggml_backend_t backend, enum sim_work work, const ggml_tensor * tensor, uint8_t * host, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor, size_t stride_host) {
    sim_backend & ctx  = sim_backend_of(backend);
    const char *  what = work == SIM_WORK_H2D ? "asynchronous set" : "asynchronous get";
    try {
        const size_t extent = (n_copies - 1) * stride_tensor + size;
        uint8_t *    device = sim_translate(*ctx.device, (const uint8_t *) tensor->data + offset, extent);
        if (!device) {
            sim_refuse(ctx, what, tensor->name, "the tensor is not in the memory of this device");
            return;
        }
        sim_op op;
        op.kind       = SIM_OP_COPY;
        op.dst        = work == SIM_WORK_H2D ? device : host;
        op.src        = work == SIM_WORK_H2D ? host : device;
        op.size       = size;
        op.n_copies   = n_copies;
        op.stride_dst = work == SIM_WORK_H2D ? stride_tensor : stride_host;
        op.stride_src = work == SIM_WORK_H2D ? stride_host : stride_tensor;
        sim_charge(*ctx.device, work, size * n_copies);
        sim_submit(ctx.stream, std::move(op));
    } catch (const std::exception & e) {
        sim_refuse(ctx, what, tensor->name, e.what());
    }
}

static void sim_set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    sim_host_copy(backend, SIM_WORK_H2D, tensor, (uint8_t *) data, offset, size, 1, 0, 0);
}

static void sim_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    sim_host_copy(backend, SIM_WORK_D2H, tensor, (uint8_t *) data, offset, size, 1, 0, 0);
}

static void sim_set_tensor_2d_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                                    size_t n_copies, size_t stride_tensor, size_t stride_data) {
    sim_host_copy(backend, SIM_WORK_H2D, tensor, (uint8_t *) data, offset, size, n_copies, stride_tensor, stride_data);
}

static void sim_get_tensor_2d_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                                    size_t n_copies, size_t stride_tensor, size_t stride_data) {
    sim_host_copy(backend, SIM_WORK_D2H, tensor, (uint8_t *) data, offset, size, n_copies, stride_tensor, stride_data);
}

// As CUDA does it: the copy is work of the source's stream, and the target's stream waits for it. The copy does not wait
// for the target's stream, so work there that still reads the old contents must have been waited for by the caller.
static bool sim_cpy_tensor_async(ggml_backend_t backend_src, ggml_backend_t backend_dst, const ggml_tensor * src, ggml_tensor * dst) {
    if (!sim_is_sim(backend_src) || !sim_is_sim(backend_dst)) {
        return false;
    }
    sim_backend & ctx_src = sim_backend_of(backend_src);
    sim_backend & ctx_dst = sim_backend_of(backend_dst);
    try {
        sim_op op;
        op.kind = SIM_OP_COPY;
        op.size = ggml_nbytes(dst);
        op.src  = sim_translate(*ctx_src.device, src->data, op.size);
        op.dst  = sim_translate(*ctx_dst.device, dst->data, op.size);
        if (!op.src || !op.dst) {
            return false;
        }
        sim_charge(*ctx_dst.device, SIM_WORK_D2D, op.size);
        sim_submit(ctx_src.stream, std::move(op));
        if (backend_src != backend_dst) {
            sim_copy_wait(ctx_dst.stream, ctx_src.stream);
        }
    } catch (const std::exception & e) {
        sim_refuse(ctx_dst, "asynchronous copy", dst->name, e.what());
    }
    return true;
}

static void sim_backend_synchronize(ggml_backend_t backend) {
    sim_synchronize(*sim_backend_of(backend).stream);
}

static enum ggml_status sim_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    sim_backend & ctx = sim_backend_of(backend);
    try {
        const int earlier = ctx.stream->status.exchange(GGML_STATUS_SUCCESS);
        if (earlier != GGML_STATUS_SUCCESS) {
            GGML_LOG_ERROR("sim: %s: work submitted earlier on this backend has failed\n", ctx.device->name.c_str());
            return (enum ggml_status) earlier;
        }

        enum ggml_status           status;
        std::unique_ptr<sim_graph> clone = sim_graph::create(*ctx.device, graph, status);
        if (!clone) {
            ctx.device->counters.n_failed++;
            return status;
        }
        sim_charge(*ctx.device, SIM_WORK_GRAPH, clone->n_kernels());

        sim_op op;
        op.kind      = SIM_OP_GRAPH;
        op.graph     = std::move(clone);
        op.n_threads = ctx.n_threads;
        sim_submit(ctx.stream, std::move(op));

        // what ran at once, or was caught up with, can be reported at once
        return (enum ggml_status) ctx.stream->status.exchange(GGML_STATUS_SUCCESS);
    } catch (const std::exception & e) {
        GGML_LOG_ERROR("sim: %s: %s\n", ctx.device->name.c_str(), e.what());
        ctx.device->counters.n_failed++;
        return GGML_STATUS_ALLOC_FAILED;
    }
}

// also the mark by which our events are known
static void sim_device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    delete (sim_event *) event->context;
    delete event;

    GGML_UNUSED(dev);
}

static void sim_backend_event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    sim_event_record(*(sim_event *) event->context, sim_backend_of(backend).stream);
}

static void sim_backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    sim_backend & ctx = sim_backend_of(backend);
    if (event->device->iface.event_free != sim_device_event_free) {
        sim_refuse(ctx, "wait for an event", ggml_backend_dev_name(event->device), "the event is not of a simulated device");
        return;
    }
    try {
        sim_event_wait(ctx.stream, *(sim_event *) event->context);
    } catch (const std::exception & e) {
        sim_refuse(ctx, "wait for an event", ctx.device->name.c_str(), e.what());
    }
}

static const ggml_backend_i sim_backend_iface = {
    /* .get_name                = */ sim_backend_get_name,
    /* .free                    = */ sim_backend_free,
    /* .set_tensor_async        = */ sim_set_tensor_async,
    /* .get_tensor_async        = */ sim_get_tensor_async,
    /* .set_tensor_2d_async     = */ sim_set_tensor_2d_async,
    /* .get_tensor_2d_async     = */ sim_get_tensor_2d_async,
    /* .cpy_tensor_async        = */ sim_cpy_tensor_async,
    /* .synchronize             = */ sim_backend_synchronize,
    /* .graph_plan_create       = */ NULL,
    /* .graph_plan_free         = */ NULL,
    /* .graph_plan_update       = */ NULL,
    /* .graph_plan_compute      = */ NULL,
    /* .graph_compute           = */ sim_graph_compute,
    /* .event_record            = */ sim_backend_event_record,
    /* .event_wait              = */ sim_backend_event_wait,
    /* .graph_optimize          = */ NULL,
};

// device

static const char * sim_device_get_name(ggml_backend_dev_t dev) {
    return sim_device_of(dev).name.c_str();
}

static const char * sim_device_get_description(ggml_backend_dev_t dev) {
    return sim_device_of(dev).description.c_str();
}

static void sim_device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    sim_device &                device = sim_device_of(dev);
    std::lock_guard<std::mutex> lock(device.mutex);
    *free  = device.capacity - device.allocated;
    *total = device.capacity;
}

static enum ggml_backend_dev_type sim_device_get_type(ggml_backend_dev_t dev) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;

    GGML_UNUSED(dev);
}

static void sim_device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = sim_device_get_name(dev);
    props->description = sim_device_get_description(dev);
    props->type        = sim_device_get_type(dev);
    props->device_id   = nullptr; // devices with equal ids are taken for one device by llama.cpp
    sim_device_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {
        /* .async                 = */ true,
        /* .host_buffer           = */ true,
        /* .buffer_from_host_ptr  = */ false,
        /* .events                = */ true,
        /* .mmap_support          = */ true,
    };
}

static ggml_backend_t sim_device_init_backend(ggml_backend_dev_t dev, const char * params) {
    GGML_UNUSED(params);
    sim_device & device = sim_device_of(dev);

    ggml_backend_t inner = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (!inner) {
        GGML_LOG_ERROR("sim: %s: no CPU backend is registered to compute with\n", device.name.c_str());
        return nullptr;
    }
    std::shared_ptr<sim_stream> stream = sim_stream_new(device, inner);
    if (!stream) {
        return nullptr;
    }
    try {
        return new ggml_backend {
            /* .guid    = */ sim_guid(),
            /* .iface   = */ sim_backend_iface,
            /* .device  = */ dev,
            /* .context = */ new sim_backend { &device, stream, GGML_DEFAULT_N_THREADS },
        };
    } catch (const std::exception &) {
        sim_stream_close(stream);
        return nullptr;
    }
}

static ggml_backend_buffer_type_t sim_device_get_buffer_type(ggml_backend_dev_t dev) {
    return &sim_device_of(dev).buft;
}

static ggml_backend_buffer_type_t sim_device_get_host_buffer_type(ggml_backend_dev_t dev) {
    return &sim().host_buft;

    GGML_UNUSED(dev);
}

static bool sim_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return sim_supports_op(sim_device_of(dev), op);
}

static bool sim_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &sim_device_of(dev).buft;
}

static bool sim_device_offload_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return sim_offload_op(op);

    GGML_UNUSED(dev);
}

static ggml_backend_event_t sim_device_event_new(ggml_backend_dev_t dev) {
    try {
        return new ggml_backend_event {
            /* .device  = */ dev,
            /* .context = */ new sim_event,
        };
    } catch (const std::exception &) {
        return nullptr;
    }
}

static void sim_device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event) {
    sim_event_synchronize(sim_device_of(dev), *(sim_event *) event->context);
}

const ggml_backend_device_i sim_device_iface = {
    /* .get_name             = */ sim_device_get_name,
    /* .get_description      = */ sim_device_get_description,
    /* .get_memory           = */ sim_device_get_memory,
    /* .get_type             = */ sim_device_get_type,
    /* .get_props            = */ sim_device_get_props,
    /* .init_backend         = */ sim_device_init_backend,
    /* .get_buffer_type      = */ sim_device_get_buffer_type,
    /* .get_host_buffer_type = */ sim_device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ NULL,
    /* .supports_op          = */ sim_device_supports_op,
    /* .supports_buft        = */ sim_device_supports_buft,
    /* .offload_op           = */ sim_device_offload_op,
    /* .event_new            = */ sim_device_event_new,
    /* .event_free           = */ sim_device_event_free,
    /* .event_synchronize    = */ sim_device_event_synchronize,
};

// registry

static const char * sim_reg_get_name(ggml_backend_reg_t reg) {
    return "SIM";

    GGML_UNUSED(reg);
}

static size_t sim_reg_get_device_count(ggml_backend_reg_t reg) {
    return sim().devices.size();

    GGML_UNUSED(reg);
}

static ggml_backend_dev_t sim_reg_get_device(ggml_backend_reg_t reg, size_t index) {
    GGML_ASSERT(index < sim().devices.size());
    return &sim().devices[index]->dev;

    GGML_UNUSED(reg);
}

static void sim_set_n_threads(ggml_backend_t backend, int n_threads) {
    GGML_ASSERT(sim_is_sim(backend));
    sim_backend_of(backend).n_threads = n_threads;
}

// Unlike CUDA's it has ggml_backend_set_n_threads: results depend on the number of threads, as they do on the CPU. It has
// no abort callback and no thread pool, like CUDA: what was submitted to a device runs to its end.
static void * sim_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    if (strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return (void *) sim_set_n_threads;
    }
    if (strcmp(name, "ggml_backend_register_host_buffer") == 0) {
        return (void *) sim_register_host_buffer;
    }
    if (strcmp(name, "ggml_backend_unregister_host_buffer") == 0) {
        return (void *) sim_unregister_host_buffer;
    }
    return nullptr;

    GGML_UNUSED(reg);
}

const ggml_backend_reg_i sim_reg_iface = {
    /* .get_name         = */ sim_reg_get_name,
    /* .get_device_count = */ sim_reg_get_device_count,
    /* .get_device       = */ sim_reg_get_device,
    /* .get_proc_address = */ sim_reg_get_proc_address,
};
