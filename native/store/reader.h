#pragma once

// A pool of threads that read pieces of files to where they are needed. It knows neither ggml nor experts.
//
// Several threads submit reads and wait for them; a ticket stands for what was submitted together. Large reads are cut into
// pieces, so that one expert is read by several readers at once. Reads go past the page cache (O_DIRECT) where that works, and
// otherwise take out of it again what they brought in.
//
// A read that fails or is stuck fails its ticket and nothing else. A reader that is stuck in the system is left behind, with
// its buffer, and another takes its place.

#include "store/file_port.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// Consecutive bytes of a file and where they go.
struct store_read {
    int32_t  file;   // of add_file
    uint64_t offset; // bytes
    uint64_t size;   // bytes
    void *   dst;
};

enum class store_direct {
    automatic, // directly where it works, else buffered, and warning() says so
    on,        // directly, or not at all
    off,       // through the page cache
};

struct store_counters {
    uint64_t reads          = 0; // calls to the system that read
    uint64_t bytes          = 0; // asked for, of reads (their pieces) that arrived
    uint64_t disk_bytes     = 0; // what the system gave, alignment and repetitions included: direct_bytes + buffered_bytes
    uint64_t direct_bytes   = 0;
    uint64_t buffered_bytes = 0;
    uint64_t in_place_bytes = 0; // of bytes, those that were not copied
    uint64_t retries        = 0; // calls repeated after EIO or EAGAIN
    uint64_t errors         = 0; // tickets that failed
    uint64_t timeouts       = 0; // of those, because a reader was stuck or none was free
    uint64_t read_ns        = 0; // inside of reads, summed over the readers
    uint64_t wait_ns        = 0; // callers blocked in wait() and cancel(), summed
    uint64_t queue_peak     = 0; // pieces waiting for a reader at once
};

struct reader_tuning {
    uint64_t piece_bytes = 0; // reads are cut into pieces of about this size; 0: reader_pool::PIECE_BYTES

    // Read to dst itself what its alignment allows (dst + k and offset + k are multiples of the alignment for some k; always if
    // buffered). What it costs: the system may write to dst even after a wait() that failed, until in_use() says no. Without
    // it everything is copied from the readers' own buffers, and after wait() nobody writes to dst in any case.
    // It saves 0.06 of 0.15 seconds of CPU per GB, and reads were not faster.
    bool in_place = false;
};

class reader_pool {
  public:
    // Measured on a virtual disk of 1 GB/s with 2 cores: 1, 2, 4, 8 and 16 readers gave 600, 720, 990, 990 and 990 MB/s, and
    // three misses at once (2.7 MiB) came soonest in pieces of half a MiB: 3.0 ms, against 5.0 in those of 128 KiB.
    static constexpr int32_t  N_THREADS    = 8;
    static constexpr int      N_PRIORITIES = 4;
    static constexpr uint64_t PIECE_BYTES  = 512 * 1024;
    static constexpr uint64_t TIMEOUT_MS   = 30000;

    // n_threads: 0 takes N_THREADS. timeout_ms: no piece may take longer to be read; 0: no limit, and then a stuck reader hangs
    // those who wait for it and the destructor. port: NULL for the system's files. NULL: error says why.
    static std::unique_ptr<reader_pool> create(int32_t n_threads, store_direct direct, uint64_t timeout_ms, std::shared_ptr<file_port> port,
                                               std::string & error, const reader_tuning & tuning = {});

    // Drops what has not begun, and waits for what has, at most for the timeout. Nobody may be waiting.
    ~reader_pool();

    reader_pool(const reader_pool &)             = delete;
    reader_pool & operator=(const reader_pool &) = delete;

    // Open a file, with descriptors of our own. Returns its index, the same one if it is open already; -1: error says why. A
    // file that is truncated, written to or replaced by another from now on is an error of the reads that follow.
    int32_t add_file(const std::string & path, std::string & error);

    // Does not block. priority 0: needed now; 1, 2, 3: ahead of use, served only when nothing of a lower number waits or is being
    // read. names[n] (or NULL, also each) say in errors what is read, for example "blk.3.ffn_up_exps.weight expert 17"; they are copied.
    // dst must stay until wait() or cancel() has returned. Returns a ticket, never 0, which must be given to one of the two.
    // Without `wake` idle readers are left alone until wake(), a wait or another submit: for those who submit several tickets.
    uint64_t submit(const store_read * reads, size_t n, int priority, const char * const * names, bool wake = true);
    void     wake();

    // Whether wait() would return without waiting. It does not notice timeouts by itself.
    bool done(uint64_t ticket) const;

    // Until all of the ticket is there; what was read ahead is needed now. The ticket ends with it. false: error names file,
    // offset, size, what was read and why it failed; dst is undefined then.
    bool wait(uint64_t ticket, std::string & error);

    // As wait(), but drops what has not begun, and the rest arrives or not.
    void cancel(uint64_t ticket);

    // Whether the system may still write to a dst of this ticket, after a wait() or cancel() that ended because a reader was
    // stuck. Always false without reader_tuning::in_place.
    bool in_use(uint64_t ticket) const;

    store_counters counters() const;

    // Why files are read through the page cache though direct reads were not switched off: one text, about the first of them.
    // Empty if there is none.
    std::string warning() const;

    int32_t n_threads() const;

    // The most that the readers' own buffers can take, in bytes, when no read is larger than this.
    uint64_t buffer_bytes(uint64_t largest_read) const;

  private:
    struct state;
    struct reader;
    struct ticket;
    struct piece;

    reader_pool();

    // shared with the readers: a stuck one may outlive the pool
    std::shared_ptr<state> s;
};
