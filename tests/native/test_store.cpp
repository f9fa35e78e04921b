// The reader pool: bytes of random pieces against the file's, the order of reads, the page cache, and bad calls.
//
// Its files lie beside the program, since direct reads need a real disk. Prints a line per failed check and a closing
// 'N passed, N failed'.

#include "store_helpers.h"

#if defined(__linux__)
#    include <fcntl.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>
#endif

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
    std::atomic<uint64_t> n_reads { 0 };
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
                n_reads++;
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
    CHECK(faults.longest_read > 0 || c.disk_bytes <= c.bytes + n_reads * 2 * 4096); // the blocks at both ends
    CHECK(pool->warning().empty() == (really || direct == store_direct::off));      // nothing made it fall back on the way
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
            faults.direct_block  = 512; // addresses are harder to please than offsets
            faults.direct_memory = 4096;
            test_random_reads(direct, in_place, 4, 65536, faults);
        }
    }
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
    target           ahead(0, 200 * 4096, 0), later(0, 4096, 0), needed(8192, 4096, 0), last(500000, 50000, 0);
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
    CHECK(port->n_reads() - before < 60 && pool->counters().errors == 0);

    // several readers read the pieces of one read at the same time
    CHECK(port->n_at_once() == 1);
    f.delay_us = 20000;
    port->set_faults(f);
    pool = make_pool(8, store_direct::off, 60000, port, 4096);
    CHECK(pool->add_file(file.path, error) == 0);
    CHECK(read_one(*pool, 0, file.content, 0, 32 * 4096).empty() && port->n_at_once() == 8);

    // and share no block
    pool = make_pool(8, store_direct::automatic, 60000, nullptr, 4096);
    CHECK(pool->add_file(file.path, error) == 0 && read_one(*pool, 0, file.content, 33, 1000000).empty());
    CHECK(pool->counters().reads > 200 && pool->counters().disk_bytes <= 1000000 + 2 * 4096);
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
    test_page_cache();
    test_order();
    test_turns();
    test_faults();
    fs::remove_all(folder);
    std::printf("%d passed, %d failed\n", n_passed.load(), n_failed.load());
    return n_failed == 0 ? 0 : 1;
}
