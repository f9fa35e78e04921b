#pragma once

// What the tests of the reader pool share: checks, files that remove themselves, memory with guards.

#include "store/fault_port.h"
#include "store/reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace fs = std::filesystem;

inline std::atomic<int> n_passed { 0 };
inline std::atomic<int> n_failed { 0 };

inline void check(bool ok, const char * what, int line) {
    if (ok) {
        n_passed++;
    } else {
        n_failed++;
        std::printf("line %d: FAILED: %s\n", line, what);
    }
}

#define CHECK(condition) check((condition), #condition, __LINE__)

// what a check needs to be understood is on the line before it
#define CHECK_HAS(text, part)                                     \
    do {                                                          \
        if ((text).find(part) == std::string::npos) {             \
            std::printf("not in this: \"%s\"\n", (text).c_str()); \
        }                                                         \
        CHECK((text).find(part) != std::string::npos);            \
    } while (0)

inline fs::path folder;
inline bool     has_direct = false; // direct reads work in the folder

using bytes = std::vector<uint8_t>;

inline bytes random_bytes(size_t size, uint64_t seed) {
    std::mt19937_64 rng(seed);
    bytes           b(size);
    for (auto & x : b) {
        x = (uint8_t) rng();
    }
    return b;
}

// A file that is removed at the end.
struct temporary {
    std::string path;
    bytes       content;

    temporary(const char * name, size_t size, uint64_t seed, const fs::path & where = folder) : path((where / name).string()), content(random_bytes(size, seed)) {
        write(content);
    }

    ~temporary() { fs::remove(path); }

    void write(const bytes & b) const {
        std::ofstream out(path, std::ios::binary | std::ios::trunc);
        out.write((const char *) b.data(), (std::streamsize) b.size());
    }
};

// Room for a read, with guards around it.
struct target {
    enum { GUARD = 4096 + 64 };

    bytes    memory;
    uint64_t offset;
    uint64_t size;
    size_t   begin;

    // phase: of the address, modulo 4096
    target(uint64_t offset, uint64_t size, size_t phase) : memory(size + 2 * GUARD + 4096, 0x5a), offset(offset), size(size) {
        const size_t at = ((uintptr_t) memory.data() + GUARD) % 4096;
        begin           = GUARD + (phase + 4096 - at) % 4096;
    }

    uint8_t *  dst() { return memory.data() + begin; }
    store_read read(int32_t file) { return { file, offset, size, dst() }; }

    bool arrived(const bytes & content) const { return size == 0 || std::memcmp(memory.data() + begin, content.data() + offset, size) == 0; }

    bool untouched(size_t from, size_t to) const {
        return std::all_of(memory.begin() + (std::ptrdiff_t) from, memory.begin() + (std::ptrdiff_t) to, [](uint8_t b) { return b == 0x5a; });
    }

    bool guarded() const { return untouched(0, begin) && untouched(begin + size, memory.size()); }
    bool untouched() const { return untouched(0, memory.size()); }
};

inline std::unique_ptr<reader_pool> make_pool(int32_t n_threads, store_direct direct, uint64_t timeout_ms, std::shared_ptr<file_port> port,
                                              uint64_t piece_bytes = 0, bool in_place = false) {
    reader_tuning tuning;
    tuning.piece_bytes = piece_bytes;
    tuning.in_place    = in_place;
    std::string error;
    auto        pool = reader_pool::create(n_threads, direct, timeout_ms, std::move(port), error, tuning);
    if (!pool) {
        std::printf("no pool: %s\n", error.c_str());
    }
    return pool;
}

// One read from begin to end. The error, or "" if it was read, rightly.
inline std::string read_one(reader_pool & pool, int32_t file, const bytes & content, uint64_t offset, uint64_t size, const char * name = "blk.3.ffn_up_exps.weight expert 17") {
    target           t(offset, size, 64);
    const store_read r = t.read(file);
    std::string      error;
    if (!pool.wait(pool.submit(&r, 1, 0, &name), error)) {
        return error.empty() ? "no text" : error;
    }
    return !t.guarded() ? "outside of dst" : t.arrived(content) ? "" :
                                                                  "WRONG BYTES";
}

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Wait for something that a reader does on its own.
template <typename F> bool soon(F condition) {
    for (int i = 0; i < 5000 && !condition(); i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return condition();
}

void test_faults(); // test_store_faults.cpp
void test_turns();  // test_store_turns.cpp
