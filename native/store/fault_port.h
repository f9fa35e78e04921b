#pragma once

// A file port with faults to order, for tests: of what it is not told to break, it asks the system's files.

#include "store/file_port.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

// Reads are counted from 1 since set_faults(), those of alignment probes too. 0: that fault does not happen.
struct file_faults {
    uint64_t fail_from    = 0; // the first read that fails
    uint64_t fail_count   = 1; // how many do
    int32_t  fail_errno   = 5; // EIO; 0 is the end of the file
    uint64_t longest_read = 0; // bytes: reads are short
    uint64_t delay_us     = 0; // of each read
    uint64_t stick_from   = 0; // the first read that does not return before release()
    uint64_t stick_count  = 1; // how many do not

    bool     refuse_direct_open = false;
    bool     refuse_direct_read = false; // EINVAL
    uint32_t direct_block       = 0;     // direct reads work with multiples of this, and the system does not tell
    uint32_t direct_memory      = 0;     // the same for addresses; 0: as direct_block

    uint64_t ends_at  = UINT64_MAX; // bytes: files are truncated there
    bool     replaced = false;      // paths lead to other files
    bool     touched  = false;      // files were written to
};

class fault_port final : public file_port {
  public:
    fault_port() : inner(system_file_port()) {}

    void     set_faults(const file_faults & faults);
    void     release(); // those that are stuck, and all that would be
    uint64_t n_reads() const;
    uint64_t n_direct_reads() const; // that were asked for
    uint64_t n_stuck() const;
    uint64_t n_at_once() const; // most reads that were delayed at the same time
    int32_t  n_open() const;
    uint64_t forgotten_bytes() const;

    int            open(const char * path, bool direct) override;
    void           close(int file) override;
    int            identify(int file, file_identity & identity) override;
    int            identify_path(const char * path, file_identity & identity) override;
    file_alignment alignment(int file) override;
    int64_t        read(int file, const file_part * parts, int32_t n_parts, uint64_t offset) override;
    void           forget(int file, uint64_t offset, uint64_t size) override;
    void           thread_begins() override { inner->thread_begins(); }

  private:
    void change(file_identity & identity) const;

    const std::shared_ptr<file_port> inner;

    mutable std::mutex      mutex; // guards what follows
    std::condition_variable released;
    file_faults             faults;
    uint64_t                reads        = 0;
    uint64_t                direct_reads = 0;
    uint64_t                stuck        = 0; // now
    uint64_t                delayed      = 0; // now
    uint64_t                at_once      = 0;
    uint64_t                forgotten    = 0; // bytes
    std::map<int, bool>     files;            // open ones: direct?
};
