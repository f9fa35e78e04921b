#include "store/fault_port.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

void fault_port::set_faults(const file_faults & f) {
    const std::lock_guard<std::mutex> lock(mutex);
    faults = f;
    reads  = 0;
}

void fault_port::release() {
    const std::lock_guard<std::mutex> lock(mutex);
    faults.stick_from = 0;
    released.notify_all();
}

uint64_t fault_port::n_reads() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return reads;
}

uint64_t fault_port::n_direct_reads() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return direct_reads;
}

uint64_t fault_port::n_stuck() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return stuck;
}

uint64_t fault_port::n_at_once() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return at_once;
}

int32_t fault_port::n_open() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return (int32_t) files.size();
}

uint64_t fault_port::forgotten_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return forgotten;
}

int fault_port::open(const char * path, bool direct) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        if (direct && faults.refuse_direct_open) {
            return -EINVAL;
        }
    }
    const int                         file = inner->open(path, direct);
    const std::lock_guard<std::mutex> lock(mutex);
    if (file >= 0) {
        files[file] = direct;
    }
    return file;
}

void fault_port::close(int file) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        files.erase(file);
    }
    inner->close(file);
}

void fault_port::change(file_identity & identity) const {
    const std::lock_guard<std::mutex> lock(mutex);
    identity.size         = std::min(identity.size, faults.ends_at);
    identity.modified_ns += faults.touched ? 1 : 0;
}

int fault_port::identify(int file, file_identity & identity) {
    const int rc = inner->identify(file, identity);
    change(identity);
    return rc;
}

int fault_port::identify_path(const char * path, file_identity & identity) {
    const int rc = inner->identify_path(path, identity);
    change(identity);
    const std::lock_guard<std::mutex> lock(mutex);
    identity.inode += faults.replaced ? 1 : 0;
    return rc;
}

file_alignment fault_port::alignment(int file) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        if (faults.direct_block > 0) {
            return {};
        }
    }
    return inner->alignment(file);
}

int64_t fault_port::read(int file, const file_part * parts, int32_t n_parts, uint64_t offset) {
    uint64_t longest = UINT64_MAX;
    uint64_t delay   = 0;
    {
        std::unique_lock<std::mutex> lock(mutex);
        const uint64_t               no     = ++reads;
        const bool                   direct = files[file];
        direct_reads                       += direct;
        if (direct && faults.refuse_direct_read) {
            return -EINVAL;
        }
        const uint32_t memory = faults.direct_memory > 0 ? faults.direct_memory : faults.direct_block;
        for (int32_t i = 0; direct && faults.direct_block > 0 && i < n_parts; i++) {
            if ((parts[i].size | offset) % faults.direct_block != 0 || (uintptr_t) parts[i].data % memory != 0) {
                return -EINVAL;
            }
        }
        if (faults.stick_from > 0 && no >= faults.stick_from && no < faults.stick_from + faults.stick_count) {
            stuck++;
            released.wait(lock, [&] { return faults.stick_from == 0; });
            stuck--;
        }
        if (faults.fail_from > 0 && no >= faults.fail_from && no < faults.fail_from + faults.fail_count) {
            return -faults.fail_errno;
        }
        longest = faults.longest_read > 0 ? faults.longest_read : UINT64_MAX;
        longest = std::min(longest, faults.ends_at - std::min(faults.ends_at, offset));
        delay   = faults.delay_us;
        at_once = std::max(at_once, ++delayed);
    }
    if (delay > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
    }
    {
        const std::lock_guard<std::mutex> lock(mutex);
        delayed--;
    }
    if (longest == 0) {
        return 0;
    }
    // What is longer is cut after it was read, since a direct read cannot ask for less than a block, and made unusable.
    const int64_t n = inner->read(file, parts, n_parts, offset);
    if (n <= 0 || (uint64_t) n <= longest) {
        return n;
    }
    uint64_t keep = longest;
    for (int32_t i = 0; i < n_parts; i++) {
        const uint64_t kept = std::min(keep, parts[i].size);
        std::memset((uint8_t *) parts[i].data + kept, 0xa5, parts[i].size - kept);
        keep -= kept;
    }
    return (int64_t) longest;
}

void fault_port::forget(int file, uint64_t offset, uint64_t size) {
    {
        const std::lock_guard<std::mutex> lock(mutex);
        forgotten += size;
    }
    inner->forget(file, offset, size);
}
