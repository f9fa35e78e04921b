#include "expert_stream.h"

#include "store/stream_buffer.h"

#include <algorithm>

std::unique_ptr<expert_stream> expert_stream::create(const std::vector<ggml_tensor *> & tensors, int32_t n_threads, store_direct direct, std::string & error) {
    error.clear();
    streamed_experts * experts = tensors.empty() ? nullptr : streamed_experts_of(tensors[0]);
    if (!experts) {
        return nullptr;
    }
    const std::shared_ptr<reader_pool> readers = experts->readers(n_threads, direct, error);
    return readers ? create(tensors, readers, error) : nullptr;
}

std::unique_ptr<expert_stream> expert_stream::create(const std::vector<ggml_tensor *> & tensors, const std::shared_ptr<reader_pool> & readers, std::string & error) {
    error.clear();
    auto stream     = std::make_unique<expert_stream>();
    stream->readers = readers;
    for (const ggml_tensor * t : tensors) {
        streamed_experts * experts = streamed_experts_of(t);
        if (!experts) {
            return nullptr;
        }
        const file_range * range = experts->find(t);
        if (!range) {
            error = std::string("it is not known where ") + t->name + " lies";
            return nullptr;
        }
        place p;
        p.name         = t->name;
        p.offset       = range->offset;
        p.expert_bytes = t->nb[2];
        p.file         = readers->add_file(range->path, error);
        if (p.file < 0) {
            return nullptr;
        }
        stream->tensors.push_back(std::move(p));
    }
    return stream;
}

uint64_t expert_stream::largest_read() const {
    uint64_t bytes = 0;
    for (const place & p : tensors) {
        bytes = std::max(bytes, p.expert_bytes);
    }
    return bytes;
}

uint64_t expert_stream::start(const std::vector<slot_load> & loads, const std::function<void *(int32_t tensor, int32_t slot)> & dst) {
    reads.clear();
    names.clear();
    name_pointers.clear();
    for (const slot_load & load : loads) {
        for (size_t t = 0; t < tensors.size(); t++) {
            const place & p = tensors[t];
            reads.push_back({ p.file, p.offset + load.expert * p.expert_bytes, p.expert_bytes, dst((int32_t) t, load.slot) });
            names.push_back(p.name + " expert " + std::to_string(load.expert));
        }
    }
    for (const std::string & name : names) {
        name_pointers.push_back(name.c_str());
    }
    return readers->submit(reads.data(), reads.size(), 0, name_pointers.data());
}

uint64_t expert_stream::start(int32_t tensor, int32_t expert, void * dst, int32_t priority) {
    const place &     p    = tensors[tensor];
    const store_read  read = { p.file, p.offset + expert * p.expert_bytes, p.expert_bytes, dst };
    const std::string name = p.name + " expert " + std::to_string(expert);
    const char *      text = name.c_str();
    return readers->submit(&read, 1, priority, &text, false);
}

bool expert_stream::wait(uint64_t ticket, std::string & error) {
    if (readers->wait(ticket, error)) {
        return true;
    }
    if (readers->in_use(ticket)) {
        is_stuck = true;
    }
    return false;
}

void expert_stream::cancel(uint64_t ticket) {
    readers->cancel(ticket);
    if (readers->in_use(ticket)) {
        is_stuck = true;
    }
}
