#pragma once

// The port to the system's files: all that the stores ask of it, so that tests can put faults in between (fault_port.h).
//
// Functions return 0 or more if they worked, and -errno if not; they throw nothing and are called from several threads at the
// same time. Offsets and sizes are bytes.

#include <cstdint>
#include <memory>

struct file_identity {
    bool     is_regular  = false;
    uint64_t size        = 0; // bytes
    uint64_t device      = 0;
    uint64_t inode       = 0;
    int64_t  modified_ns = 0; // since 1970
};

// What direct reads must be multiples of. 0: the system does not tell.
struct file_alignment {
    uint32_t memory = 0; // bytes, of addresses
    uint32_t offset = 0; // bytes, of offsets in the file and of sizes
};

// Where consecutive bytes of a file go.
struct file_part {
    void *   data;
    uint64_t size; // bytes
};

class file_port {
  public:
    enum { MAX_PARTS = 3 };

    virtual ~file_port() = default;

    // Open a regular file for reading; the caller has looked that it is one. direct: past the page cache; -EINVAL, -ENOTSUP or
    // -EOPNOTSUPP if that is refused here. Otherwise the file is opened without read-ahead. Returns a descriptor.
    virtual int  open(const char * path, bool direct) = 0;
    virtual void close(int file)                      = 0;

    // Of an open file; of what a path leads to now.
    virtual int identify(int file, file_identity & identity)               = 0;
    virtual int identify_path(const char * path, file_identity & identity) = 0;

    // What direct reads of this file must be aligned to, as far as the system tells.
    virtual file_alignment alignment(int file) = 0;

    // Fill 1 to MAX_PARTS parts from the file, beginning at offset. Returns bytes, which can be fewer; 0 is the file's end.
    virtual int64_t read(int file, const file_part * parts, int32_t n_parts, uint64_t offset) = 0;

    // This range will not be needed in the page cache.
    virtual void forget(int file, uint64_t offset, uint64_t size) = 0;

    // Called by each reader thread before it reads.
    virtual void thread_begins() {}
};

// The files of this system; one object for the whole process. Direct reads are for Linux alone: elsewhere open() refuses them,
// and outside of POSIX it refuses everything (-ENOSYS).
std::shared_ptr<file_port> system_file_port();
