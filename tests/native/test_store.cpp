// The reader pool: bytes of random pieces against the file's, what it does under faults, and that nothing hangs.
//
// Its files lie beside the program, since direct reads need a real disk. Prints a line per failed check and a closing
// 'N passed, N failed'.

#include "store/fault_port.h"
#include "store/reader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#    include <fcntl.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>
#endif

namespace fs = std::filesystem;

static std::atomic<int> n_passed { 0 };
static std::atomic<int> n_failed { 0 };

static void check(bool ok, const char * what, int line) {
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

static fs::path folder;
static bool     has_direct = false; // direct reads work in the folder

using bytes = std::vector<uint8_t>;

static bytes random_bytes(size_t size, uint64_t seed) {
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

    bool arrived(const bytes & content) const { return std::memcmp(memory.data() + begin, content.data() + offset, size) == 0; }

    bool untouched(size_t from, size_t to) const {
        return std::all_of(memory.begin() + (std::ptrdiff_t) from, memory.begin() + (std::ptrdiff_t) to, [](uint8_t b) { return b == 0x5a; });
    }

    bool guarded() const { return untouched(0, begin) && untouched(begin + size, memory.size()); }
    bool untouched() const { return untouched(0, memory.size()); }
};

static std::unique_ptr<reader_pool> make_pool(int32_t n_threads, store_direct direct, uint64_t timeout_ms, std::shared_ptr<file_port> port,
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
static std::string read_one(reader_pool & pool, int32_t file, const bytes & content, uint64_t offset, uint64_t size, const char * name = "blk.3.ffn_up_exps.weight expert 17") {
    target           t(offset, size, 64);
    const store_read r = t.read(file);
    std::string      error;
    if (!pool.wait(pool.submit(&r, 1, 0, &name), error)) {
        return error.empty() ? "no text" : error;
    }
    return !t.guarded() ? "outside of dst" : t.arrived(content) ? "" :
                                                                  "WRONG BYTES";
}

static double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Wait for something that a reader does on its own.
template <typename F> static bool soon(F condition) {
    for (int i = 0; i < 5000 && !condition(); i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return condition();
}

// Random offsets, sizes and addresses from several threads: the file's bytes arrive, nothing else is written, counters add up.
static void test_random_reads(store_direct direct, bool in_place, int32_t n_threads, uint64_t piece_bytes, const file_faults & faults) {
    constexpr int n_callers = 3;
    temporary     file("random.bin", 3 * 1024 * 1024 + 777, 1);
    auto          port = std::make_shared<fault_port>();
    port->set_faults(faults);
    auto                  pool = make_pool(n_threads, direct, 60000, port, piece_bytes, in_place);
    std::string           error;
    const int32_t         index = pool->add_file(file.path, error);
    std::atomic<uint64_t> asked { 0 };
    std::atomic<int>      n_wrong { 0 };

    const auto caller = [&](uint64_t seed) {
        std::mt19937_64 rng(seed);
        for (int round = 0; round < 25; round++) {
            std::vector<target>     targets;
            std::vector<store_read> reads;
            const size_t            n = 1 + rng() % 8;
            targets.reserve(n);
            for (size_t i = 0; i < n; i++) {
                const uint64_t total  = file.content.size();
                const uint64_t most[] = { 3, 700, 20000, 400000 };
                uint64_t       size   = rng() % (most[rng() % 4] + 1);
                uint64_t       offset = rng() % (total - size + 1);
                switch (rng() % 6) {
                    case 0:  offset = total - size; break;
                    case 1:  offset -= offset % 4096; break;
                    case 2:  size -= size % 512; break;
                    default: break;
                }
                const size_t phase = rng() % 3 == 0 ? rng() % 4096 : offset % 4096; // congruent: it can be read in place
                targets.emplace_back(offset, size, phase);
                reads.push_back(targets.back().read(index));
                asked += size;
            }
            std::string    why;
            const uint64_t ticket = pool->submit(reads.data(), reads.size(), (int) (rng() % 2), nullptr);
            while (rng() % 2 && !pool->done(ticket)) {
                std::this_thread::yield();
            }
            bool ok = pool->wait(ticket, why) && why.empty() && !pool->in_use(ticket) && pool->done(ticket);
            for (const target & t : targets) {
                ok = ok && t.arrived(file.content) && t.guarded();
            }
            n_wrong += !ok;
        }
    };
    std::vector<std::thread> callers;
    for (int i = 0; i < n_callers; i++) {
        callers.emplace_back(caller, 100 + i);
    }
    for (auto & c : callers) {
        c.join();
    }

    CHECK(index == 0 && n_wrong == 0);
    const store_counters c      = pool->counters();
    const bool           really = direct != store_direct::off && has_direct;
    CHECK(c.bytes == asked && c.errors == 0 && c.timeouts == 0 && c.retries == 0);
    CHECK(c.disk_bytes == c.direct_bytes + c.buffered_bytes && c.disk_bytes >= c.bytes);
    CHECK(really ? c.direct_bytes > 0 : c.direct_bytes == 0 && c.buffered_bytes > 0);
    CHECK(faults.longest_read % 4096 != 0 || !really || c.buffered_bytes == 0);
    CHECK(in_place ? c.in_place_bytes > 0 && c.in_place_bytes <= c.bytes : c.in_place_bytes == 0);
    CHECK(!in_place || really || c.in_place_bytes == c.bytes); // buffered reads have no alignment
    CHECK(c.read_ns > 0 && c.wait_ns > 0 && c.queue_peak > 0 && c.reads > 0);
    CHECK(port->forgotten_bytes() == c.buffered_bytes);
    pool.reset();
    CHECK(port->n_open() == 0);
}

static void test_all_random_reads() {
    for (const store_direct direct : { store_direct::automatic, store_direct::off }) {
        for (const bool in_place : { false, true }) {
            file_faults faults;
            test_random_reads(direct, in_place, 1, 0, faults);
            test_random_reads(direct, in_place, 4, 4096, faults);
            test_random_reads(direct, in_place, 8, 100000, faults);
            faults.longest_read = 8192; // short reads, in whole blocks and not
            test_random_reads(direct, in_place, 4, 65536, faults);
            faults.longest_read = 5000;
            test_random_reads(direct, in_place, 4, 65536, faults);
            faults.longest_read = 0;
            faults.direct_block = 4096; // a disk of larger blocks, and a system that does not tell
            test_random_reads(direct, in_place, 4, 65536, faults);
        }
    }
}

static void test_read_errors() {
    temporary   file("errors.bin", 1 << 20, 2);
    auto        port = std::make_shared<fault_port>();
    auto        pool = make_pool(2, store_direct::automatic, 60000, port);
    std::string error;
    CHECK(pool->add_file(file.path, error) == 0);
    const auto with = [&](int32_t code, uint64_t from, uint64_t count) {
        file_faults f;
        f.fail_errno = code;
        f.fail_from  = from;
        f.fail_count = count;
        port->set_faults(f);
        return read_one(*pool, 0, file.content, 12345, 6789);
    };
    CHECK(with(EIO, 1, 1).empty() && pool->counters().retries == 1);
    CHECK(with(EAGAIN, 1, 1).empty() && pool->counters().retries == 2);
    CHECK(with(EINTR, 1, 9).empty() && pool->counters().retries == 2 && pool->counters().errors == 0);

    const std::string why = with(EIO, 1, 2);
    CHECK_HAS(why, "blk.3.ffn_up_exps.weight expert 17: ");
    CHECK_HAS(why, "6789 bytes at offset 12345 of " + file.path);
    CHECK_HAS(why, "errno 5");
    CHECK(port->n_reads() == 2 && pool->counters().errors == 1);
    CHECK_HAS(with(ENXIO, 1, 1), "errno " + std::to_string(ENXIO)); // not repeated
    CHECK(with(EIO, 0, 0).empty());                                 // usable as before

    // one of many pieces fails at its second read: the ticket fails, no guard is hurt, others do not notice
    file_faults f;
    f.fail_from  = 5;
    f.fail_count = 1000;
    f.delay_us   = 2000;
    port->set_faults(f);
    auto   small = make_pool(4, store_direct::automatic, 60000, port, 4096);
    target t(0, 1 << 20, 0);
    CHECK(small->add_file(file.path, error) == 0);
    const store_read r      = t.read(0);
    const uint64_t   ticket = small->submit(&r, 1, 0, nullptr);
    CHECK(!small->wait(ticket, error) && t.guarded());
    CHECK_HAS(error, "errno 5");
    CHECK(port->n_reads() < 64); // the other pieces were dropped
    const bytes before = t.memory;
    port->set_faults({});
    CHECK(read_one(*small, 0, file.content, 1, 99999).empty());
    CHECK(t.memory == before); // nothing comes after the wait
    CHECK(small->counters().errors == 1);
}

static void test_changed_files() {
    std::string error;
    const auto  fresh = [&](const temporary & file, store_direct direct) {
        auto pool = make_pool(2, direct, 60000, nullptr);
        CHECK(pool->add_file(file.path, error) == 0 && read_one(*pool, 0, file.content, 5000, 70000).empty());
        return pool;
    };
    for (const store_direct direct : { store_direct::automatic, store_direct::off }) {
        temporary file("changed.bin", 300000, 3);
        auto      pool = fresh(file, direct);
        fs::resize_file(file.path, 100000);
        CHECK_HAS(read_one(*pool, 0, file.content, 90000, 20000), "truncated");  // over the new end
        CHECK_HAS(read_one(*pool, 0, file.content, 200000, 20000), "truncated"); // behind it
        CHECK_HAS(read_one(*pool, 0, file.content, 0, 20000), "truncated");      // before it: not trusted any more

        file.write(file.content);
        pool = fresh(file, direct);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        {
            std::fstream out(file.path, std::ios::binary | std::ios::in | std::ios::out);
            out.seekp(150000);
            out << "other bytes";
        }
        CHECK_HAS(read_one(*pool, 0, file.content, 140000, 20000), "written to");

        file.write(file.content);
        pool = fresh(file, direct);
        {
            temporary other("other.bin", 300000, 4);
            fs::rename(other.path, file.path);
        }
        CHECK_HAS(read_one(*pool, 0, file.content, 0, 20000), "replaced");

        file.write(file.content);
        pool = fresh(file, direct);
        fs::remove(file.path);
        CHECK(read_one(*pool, 0, file.content, 0, 300000).empty()); // its bytes are still there
    }

    // the same from the port
    temporary file("changed.bin", 300000, 3);
    auto      port = std::make_shared<fault_port>();
    auto      pool = make_pool(2, store_direct::automatic, 60000, port);
    CHECK(pool->add_file(file.path, error) == 0);
    const auto with = [&](file_faults f) {
        port->set_faults(f);
        return read_one(*pool, 0, file.content, 1000, 200000);
    };
    file_faults f;
    f.ends_at = 100000;
    CHECK_HAS(with(f), "truncated");
    f          = {};
    f.replaced = true;
    CHECK_HAS(with(f), "replaced");
    f         = {};
    f.touched = true;
    CHECK_HAS(with(f), "written to");
    CHECK(with({}).empty());
}

static void test_direct_refused() {
    temporary   file("refused.bin", 300000, 5);
    std::string error;
    for (const int when : { 0, 1, 2 }) { // at open, at the first read, later
        file_faults f;
        f.refuse_direct_open = when == 0;
        f.refuse_direct_read = when > 0;
        auto port            = std::make_shared<fault_port>();
        port->set_faults(when < 2 ? f : file_faults());
        auto pool = make_pool(3, store_direct::automatic, 60000, port);
        CHECK(pool->add_file(file.path, error) == 0);
        port->set_faults(f);
        CHECK(read_one(*pool, 0, file.content, 100, 250000).empty());
        CHECK(read_one(*pool, 0, file.content, 4096, 4096).empty());
        CHECK(pool->counters().direct_bytes == 0 && pool->counters().buffered_bytes >= 254096 && pool->counters().errors == 0);
        CHECK_HAS(pool->warning(), file.path);
        CHECK_HAS(pool->warning(), "page cache");

        // asked for by name: an error instead
        port->set_faults(when < 2 ? f : file_faults());
        pool = make_pool(3, store_direct::on, 60000, port);
        if (when < 2 || !has_direct) {
            CHECK(pool->add_file(file.path, error) == -1);
            CHECK_HAS(error, "direct reads of " + file.path + " are refused");
        } else {
            CHECK(pool->add_file(file.path, error) == 0 && pool->warning().empty());
            port->set_faults(f);
            CHECK_HAS(read_one(*pool, 0, file.content, 100, 250000), "direct reads are refused");
            CHECK(pool->counters().buffered_bytes == 0);
        }
        pool.reset();
        CHECK(port->n_open() == 0);

        // not asked for: never tried, and no warning
        const uint64_t tried = port->n_direct_reads();
        pool                 = make_pool(3, store_direct::off, 60000, port);
        CHECK(pool->add_file(file.path, error) == 0 && read_one(*pool, 0, file.content, 1, 299999).empty());
        CHECK(pool->warning().empty() && port->n_direct_reads() == tried);
    }

#if defined(__linux__)
    if (fs::is_directory("/dev/shm")) {
        temporary memory("hotmoe-test-store.bin", 100000, 6, "/dev/shm");
        auto      pool = make_pool(2, store_direct::automatic, 60000, nullptr);
        CHECK(pool->add_file(file.path, error) == 0 && pool->add_file(memory.path, error) == 1);
        CHECK(read_one(*pool, 1, memory.content, 77, 88888).empty() && pool->counters().direct_bytes == 0);
        CHECK_HAS(pool->warning(), has_direct ? memory.path : file.path);
    }
#endif
}

// Buffered reads leave nothing in the page cache, also not what a read-ahead would bring.
static void test_page_cache() {
#if defined(__linux__)
    temporary file("cached.bin", 4 << 20, 7);
    const int fd = open(file.path.c_str(), O_RDONLY);
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    void *     map    = mmap(nullptr, file.content.size(), PROT_READ, MAP_SHARED, fd, 0);
    const auto cached = [&] {
        bytes pages(file.content.size() / (size_t) sysconf(_SC_PAGESIZE));
        return mincore(map, file.content.size(), pages.data()) == 0 ? std::count_if(pages.begin(), pages.end(), [](uint8_t p) { return p & 1; }) : -1;
    };
    CHECK(cached() == 0);
    auto        pool = make_pool(2, store_direct::off, 60000, nullptr);
    std::string error;
    CHECK(pool->add_file(file.path, error) == 0);
    for (uint64_t at = 0; at + 300000 < file.content.size(); at += 500000) {
        CHECK(read_one(*pool, 0, file.content, at, 300000).empty());
    }
    CHECK(cached() <= 32); // of 1024: pages at the ends of pieces stay
    munmap(map, file.content.size());
    close(fd);
#endif
}

static void test_order() {
    temporary   file("order.bin", 1 << 20, 8);
    auto        port = std::make_shared<fault_port>();
    auto        pool = make_pool(1, store_direct::off, 60000, port, 4096);
    std::string error;
    CHECK(pool->add_file(file.path, error) == 0);
    file_faults f;
    f.delay_us = 3000;
    port->set_faults(f);
    target           ahead(0, 80 * 4096, 0), later(0, 4096, 0), needed(8192, 4096, 0), last(500000, 50000, 0);
    const store_read r_ahead = ahead.read(0), r_later = later.read(0), r_needed = needed.read(0), r_last = last.read(0);

    // what is needed overtakes what is read ahead
    const uint64_t a = pool->submit(&r_ahead, 1, 1, nullptr);
    const uint64_t b = pool->submit(&r_later, 1, 1, nullptr);
    const uint64_t c = pool->submit(&r_needed, 1, 0, nullptr);
    CHECK(pool->wait(c, error) && !pool->done(a) && !pool->done(b) && needed.arrived(file.content));
    // and so does what is waited for
    CHECK(pool->wait(b, error) && !pool->done(a) && later.arrived(file.content));

    // cancelled: what has not begun is dropped, and nothing comes after
    const uint64_t before = port->n_reads();
    pool->cancel(a);
    const bytes cancelled = ahead.memory;
    CHECK(pool->done(a) && !pool->wait(a, error) && ahead.guarded());
    const uint64_t d = pool->submit(&r_last, 1, 0, nullptr);
    CHECK(pool->wait(d, error) && last.arrived(file.content) && ahead.memory == cancelled);
    CHECK(port->n_reads() - before < 30 && pool->counters().errors == 0);

    // several readers read the pieces of one read at the same time
    f.delay_us = 20000;
    port->set_faults(f);
    pool = make_pool(8, store_direct::off, 60000, port, 4096);
    CHECK(pool->add_file(file.path, error) == 0);
    const auto begin = std::chrono::steady_clock::now();
    CHECK(read_one(*pool, 0, file.content, 0, 32 * 4096).empty() && seconds_since(begin) < 0.4); // one by one: 0.64 s
}

static void test_stuck_reader(bool in_place) {
    temporary   file("stuck.bin", 1 << 20, 9);
    auto        port = std::make_shared<fault_port>();
    auto        pool = make_pool(1, store_direct::automatic, 150, port, 0, in_place);
    std::string error;
    CHECK(pool->add_file(file.path, error) == 0);
    file_faults f;
    f.stick_from = 1;
    port->set_faults(f);
    target           t(4096, 200000, 0);
    const store_read r      = t.read(0);
    const char *     name   = "expert 5";
    const auto       begin  = std::chrono::steady_clock::now();
    const uint64_t   ticket = pool->submit(&r, 1, 0, &name);
    CHECK(!pool->wait(ticket, error) && seconds_since(begin) > 0.14 && seconds_since(begin) < 5);
    CHECK_HAS(error, "expert 5: reading 200000 bytes at offset 4096 of " + file.path);
    CHECK_HAS(error, "timeout");
    CHECK(pool->counters().timeouts == 1 && pool->counters().errors == 1 && port->n_stuck() == 1);

    // the only reader is stuck, and the pool works on
    CHECK(read_one(*pool, 0, file.content, 4096, 200000).empty() && pool->n_threads() == 1);
    CHECK(pool->in_use(ticket) == in_place && t.untouched());
    port->release();
    CHECK(soon([&] { return port->n_stuck() == 0; }));
    CHECK(soon([&] { return !pool->in_use(ticket); }));
    if (!in_place) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK(t.untouched()); // it came back with bytes that nobody wants any more
    }
    CHECK(read_one(*pool, 0, file.content, 0, 1 << 20).empty() && t.guarded());
}

// More readers are stuck than are replaced: tickets fail, none hangs, and the pool recovers.
static void test_all_stuck() {
    temporary   file("stuck.bin", 100000, 10);
    auto        port = std::make_shared<fault_port>();
    auto        pool = make_pool(4, store_direct::off, 20, port);
    std::string error;
    CHECK(pool->add_file(file.path, error) == 0);
    file_faults f;
    f.stick_from  = 1;
    f.stick_count = UINT64_MAX / 2;
    port->set_faults(f);
    bool stalled = false;
    for (int i = 0; i < 100 && !stalled; i++) {
        const std::string why = read_one(*pool, 0, file.content, 0, 1000);
        CHECK_HAS(why, "timeout");
        stalled = why.find("no reader was free") != std::string::npos;
    }
    CHECK(stalled && pool->n_threads() == 0);
    port->release();
    CHECK(soon([&] { return pool->n_threads() == 4; }));
    CHECK(soon([&] { return read_one(*pool, 0, file.content, 0, 1000).empty(); })); // 20 ms can be too short for a busy machine
    pool.reset();
    CHECK(soon([&] { return port->n_open() == 0; }));
}

static void test_destruction() {
    temporary   file("destroyed.bin", 1 << 20, 11);
    auto        port = std::make_shared<fault_port>();
    std::string error;
    target      t(0, 1 << 20, 0);
    for (const bool stuck : { false, true }) {
        file_faults f;
        f.delay_us   = 2000;
        f.stick_from = stuck ? 6 : 0;
        auto pool    = make_pool(4, store_direct::automatic, 200, port, 4096);
        CHECK(pool->add_file(file.path, error) == 0);
        port->set_faults(f);
        const store_read r = t.read(0);
        pool->submit(&r, 1, 0, nullptr);
        CHECK(soon([&] { return port->n_reads() >= 8; }));
        const auto begin = std::chrono::steady_clock::now();
        pool.reset();
        CHECK(seconds_since(begin) < 5);
        const bytes at_end = t.memory;
        CHECK(port->n_reads() < 200 && t.guarded());
        if (stuck) {
            CHECK(port->n_stuck() == 1 && port->n_open() > 0); // its file must stay open
            port->release();
        }
        CHECK(soon([&] { return port->n_open() == 0; }));
        CHECK(t.memory == at_end);
    }
}

static void test_bad_calls() {
    temporary   file("calls.bin", 10000, 12);
    std::string error;
    CHECK(!reader_pool::create(-1, store_direct::off, 0, nullptr, error));
    CHECK_HAS(error, "io_threads is -1");
    CHECK(!reader_pool::create(257, store_direct::off, 0, nullptr, error));
    auto port = std::make_shared<fault_port>();
    auto pool = make_pool(0, store_direct::automatic, 0, port);
    CHECK(pool->n_threads() == reader_pool::N_THREADS);
    CHECK(pool->add_file((folder / "none.bin").string(), error) == -1);
    CHECK_HAS(error, "none.bin");
    CHECK(pool->add_file(folder.string(), error) == -1);
    CHECK_HAS(error, "not a regular file");
#if defined(__linux__)
    const std::string pipe = (folder / "pipe").string();
    CHECK(mkfifo(pipe.c_str(), 0600) == 0 && pool->add_file(pipe, error) == -1); // and does not block
    fs::remove(pipe);
#endif
    CHECK(pool->add_file(file.path, error) == 0);
    const int32_t n_open = port->n_open();
    CHECK(pool->add_file(file.path, error) == 0 && port->n_open() == n_open);

    CHECK_HAS(read_one(*pool, 1, file.content, 0, 1), "there are 1 files");
    CHECK_HAS(read_one(*pool, -1, file.content, 0, 1), "there are 1 files");
    CHECK_HAS(read_one(*pool, 0, file.content, 9999, 2), "ends at 10000");
    uint8_t    byte    = 0;
    store_read reads[] = {
        { 0, 0, 1, &byte },
        { 0, UINT64_MAX, 2, &byte },
    };
    CHECK(!pool->wait(pool->submit(reads, 2, 0, nullptr), error) && byte == 0); // nothing of it is read
    reads[0].dst = nullptr;
    CHECK(!pool->wait(pool->submit(reads, 1, 0, nullptr), error));
    CHECK_HAS(error, "no place");
    reads[0].size = 0;
    CHECK(pool->wait(pool->submit(reads, 1, 0, nullptr), error)); // nothing is always there
    const uint64_t none = pool->submit(nullptr, 0, 0, nullptr);
    CHECK(none > 0 && pool->done(none) && pool->wait(none, error));
    CHECK(!pool->wait(none, error) && pool->done(none));
    CHECK_HAS(error, "ticket " + std::to_string(none));
    CHECK(!pool->wait(999999, error));
    pool->cancel(999999);
    CHECK(read_one(*pool, 0, file.content, 0, 10000).empty());

    temporary empty("empty.bin", 0, 13);
    CHECK(pool->add_file(empty.path, error) == 1 && read_one(*pool, 1, empty.content, 0, 0).empty());
}

int main(int, char ** argv) {
    folder = fs::absolute(argv[0]).parent_path() / "test-store-files";
    fs::create_directories(folder);
    {
        temporary   file("probe.bin", 10000, 0);
        std::string error;
        auto        pool = make_pool(1, store_direct::on, 0, nullptr);
        has_direct       = pool->add_file(file.path, error) == 0;
        if (!has_direct) {
            std::printf("direct reads are not tested: %s\n", error.c_str());
        }
    }
    test_bad_calls();
    test_all_random_reads();
    test_read_errors();
    test_changed_files();
    test_direct_refused();
    test_page_cache();
    test_order();
    test_stuck_reader(false);
    test_stuck_reader(true);
    test_all_stuck();
    test_destruction();
    fs::remove_all(folder);
    std::printf("%d passed, %d failed\n", n_passed.load(), n_failed.load());
    return n_failed == 0 ? 0 : 1;
}
