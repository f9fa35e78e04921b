#pragma once

// A file that experts are read from: its descriptors, what it was when it was opened, and how one piece of it is read.
//
// Direct reads need aligned offsets, sizes and addresses. A piece is widened to whole blocks and read into the reader's own
// buffer, or its middle goes straight to its place and only the blocks at both ends through the buffer, all in one call.

#include "store/file_port.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// Aligned memory that grows and keeps nothing when it does.
class bounce_buffer {
  public:
    enum { ALIGNMENT = 4096 };

    bounce_buffer() = default;
    ~bounce_buffer();
    bounce_buffer(const bounce_buffer &)             = delete;
    bounce_buffer & operator=(const bounce_buffer &) = delete;

    // NULL: out of memory
    uint8_t * reserve(size_t size, size_t alignment = ALIGNMENT);

  private:
    uint8_t * data      = nullptr;
    size_t    capacity  = 0; // bytes
    size_t    alignment = ALIGNMENT;
};

// What is still to be copied when a piece was read.
struct copy_part {
    void *       to;
    const void * from;
    size_t       size; // bytes
};

struct read_outcome {
    std::string error; // the cause; empty: it was read
    copy_part   copies[2];
    int32_t     n_copies = 0;

    uint64_t reads          = 0; // calls
    uint64_t retries        = 0; // calls repeated after EIO or EAGAIN
    uint64_t direct_bytes   = 0; // read, whole blocks
    uint64_t buffered_bytes = 0; // read
    uint64_t in_place_bytes = 0; // of the piece, not copied
};

class source_file {
  public:
    enum mode { DIRECT_IF_POSSIBLE,
                DIRECT_OR_FAIL,
                BUFFERED };

    // Open the file and find out how it can be read directly. NULL: error says why.
    static std::shared_ptr<source_file> open(const std::string & path, mode how, std::shared_ptr<file_port> port, std::string & error);
    ~source_file();

    source_file(const source_file &)             = delete;
    source_file & operator=(const source_file &) = delete;

    // Read [offset, offset + size), which lies in the file, for dst. With in_place as much of it as possible is read to dst
    // itself; the rest lands in the buffer, and the outcome says what to copy. Thread-safe. `wanted` turning false ends a read
    // between two calls.
    read_outcome read(uint64_t offset, uint64_t size, void * dst, bool in_place, bounce_buffer & bounce, const std::atomic<bool> & wanted);

    // Blocks of direct reads in bytes, 1 if reads are buffered
    uint32_t block() const { return direct_works ? align.offset : 1; }

    bool is_direct() const { return direct_works; }

    // Why reads are buffered though direct ones were asked for; empty if they are not.
    std::string why_buffered() const;

    const std::string   path; // absolute
    const file_identity identity;

  private:
    struct span;

    source_file(std::string path, const file_identity & identity, mode how, std::shared_ptr<file_port> port);
    bool        probe(std::string & refusal);
    bool        same_file(std::string & error) const;
    std::string ended_at(uint64_t offset) const;

    const mode                       how;
    const std::shared_ptr<file_port> port;
    int                              buffered = -1; // descriptors
    int                              direct   = -1;
    file_alignment                   align    = { 1, 1 };
    std::atomic<bool>                direct_works { false };
    std::atomic<int>                 refused_with { 0 }; // errno
};
