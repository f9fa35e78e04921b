#pragma once

// Where the experts of one bank lie in files, and how they are read.

#include "slot_map.h"

#include "store/reader.h"

#include "ggml.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

class expert_stream {
  public:
    // NULL if the tensors are not streamed, and then error is ""; or if their files cannot be opened: error says why.
    static std::unique_ptr<expert_stream> create(const std::vector<ggml_tensor *> & tensors, int32_t n_threads, store_direct direct, std::string & error);

    // The same with given readers, instead of those of the model.
    static std::unique_ptr<expert_stream> create(const std::vector<ggml_tensor *> & tensors, const std::shared_ptr<reader_pool> & readers, std::string & error);

    // Begin to read the experts of `loads`, tensor by tensor, to where dst says. Returns a ticket, which ends with wait().
    uint64_t start(const std::vector<slot_load> & loads, const std::function<void *(int32_t tensor, int32_t slot)> & dst);

    // The same for one tensor of one expert; priority: of the readers. Reading begins with wake().
    uint64_t start(int32_t tensor, int32_t expert, void * dst, int32_t priority);

    void wake() { readers->wake(); }

    // Until all of it is there; from any thread. false: error says what could not be read and why; what `loads` got is undefined.
    bool wait(uint64_t ticket, std::string & error);

    // Whether wait() would return at once.
    bool done(uint64_t ticket) const { return readers->done(ticket); }

    // Drop a ticket whose bytes are not wanted any more.
    void cancel(uint64_t ticket);

    // A reader hangs in the system, and may write to where it was told to at any time: the slots cannot be used any more, and
    // their memory must not be freed.
    bool stuck() const { return is_stuck; }

    // Of tensor t: its place in the file modulo `alignment`. Slots that lie alike are read in place.
    size_t phase_of(int32_t t, size_t alignment) const { return tensors[t].offset % alignment; }

    const reader_pool & pool() const { return *readers; }

    // Of one expert in one tensor: the largest read.
    uint64_t largest_read() const;

  private:
    struct place {
        std::string name;
        int32_t     file         = -1;
        uint64_t    offset       = 0; // of expert 0
        uint64_t    expert_bytes = 0;
    };

    std::shared_ptr<reader_pool> readers;
    std::vector<place>           tensors;
    std::vector<store_read>      reads; // scratch, as the next two
    std::vector<std::string>     names;
    std::vector<const char *>    name_pointers;
    std::atomic<bool>            is_stuck = { false };
};
