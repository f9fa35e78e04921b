// The reader pool under faults: a failed read fails its ticket and nothing else, wrong bytes never arrive, and nothing hangs.

#include "store_helpers.h"

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
    CHECK_HAS(with(0, 1, 1), "the file ended early");               // 0 bytes read, and its size says otherwise
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
        const uint64_t n_direct = port->n_direct_reads();
        CHECK(read_one(*pool, 0, file.content, 4096, 4096).empty() && port->n_direct_reads() == n_direct); // not tried again
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

static void test_stuck_reader(bool in_place) {
    temporary   file("stuck.bin", 1 << 20, 9);
    auto        port = std::make_shared<fault_port>();
    auto        pool = make_pool(1, store_direct::automatic, 400, port, 0, in_place);
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
    CHECK(!pool->wait(ticket, error) && seconds_since(begin) > 0.39 && seconds_since(begin) < 5);
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

void test_faults() {
    test_read_errors();
    test_changed_files();
    test_direct_refused();
    test_stuck_reader(false);
    test_stuck_reader(true);
    test_all_stuck();
    test_destruction();
}
