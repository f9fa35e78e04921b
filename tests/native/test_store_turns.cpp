// Whose turn it is: the readers' four priorities, and that nobody who has work for them, or waits for them, is forgotten.

#include "store_helpers.h"

#include <condition_variable>
#include <future>
#include <mutex>
#include <utility>

constexpr uint64_t PAGE = 4096; // of the pieces here

// The system's files; it is told which reads hang until they are let go, and notes in which order they begin.
class watched_port final : public file_port {
  public:
    // Reads at [from, to) hang from now on.
    void hold(uint64_t from, uint64_t to) {
        const std::lock_guard<std::mutex> lock(mutex);
        held_from = from;
        held_to   = to;
    }

    void let_go() {
        hold(0, 0);
        changed.notify_all();
    }

    // Of the reads since the last call.
    std::vector<uint64_t> take_offsets() {
        const std::lock_guard<std::mutex> lock(mutex);
        return std::exchange(offsets, {});
    }

    size_t n_reading() const {
        const std::lock_guard<std::mutex> lock(mutex);
        return reading.size();
    }

    uint64_t delay_us = 0; // of each read

    int            open(const char * path, bool direct) override { return inner->open(path, direct); }
    void           close(int file) override { inner->close(file); }
    int            identify(int file, file_identity & identity) override { return inner->identify(file, identity); }
    int            identify_path(const char * path, file_identity & identity) override { return inner->identify_path(path, identity); }
    file_alignment alignment(int file) override { return inner->alignment(file); }
    void           forget(int file, uint64_t offset, uint64_t size) override { inner->forget(file, offset, size); }

    int64_t read(int file, const file_part * parts, int32_t n_parts, uint64_t offset) override {
        {
            std::unique_lock<std::mutex> lock(mutex);
            offsets.push_back(offset);
            reading.push_back(offset);
            changed.wait(lock, [&] { return offset < held_from || offset >= held_to; });
        }
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        const int64_t                     n = inner->read(file, parts, n_parts, offset);
        const std::lock_guard<std::mutex> lock(mutex);
        reading.erase(std::find(reading.begin(), reading.end(), offset));
        return n;
    }

  private:
    const std::shared_ptr<file_port> inner = system_file_port();

    mutable std::mutex      mutex; // guards what follows
    std::condition_variable changed;
    uint64_t                held_from = 0, held_to = 0;
    std::vector<uint64_t>   offsets;
    std::vector<uint64_t>   reading; // now
};

// A pool of n_threads over one file of N_PAGES pages, which it reads page by page.
struct scene {
    static constexpr uint64_t N_PAGES = 512;

    temporary                     file;
    std::shared_ptr<watched_port> port = std::make_shared<watched_port>();
    std::unique_ptr<reader_pool>  pool;
    bytes                         memory = bytes(N_PAGES * PAGE);
    std::string                   error;

    explicit scene(int32_t n_threads, uint64_t timeout_ms = 60000) : file("turns.bin", N_PAGES * PAGE, 30) {
        pool = make_pool(n_threads, store_direct::off, timeout_ms, port, PAGE);
        CHECK(pool->add_file(file.path, error) == 0);
    }

    // Pages go to where they are in the file.
    uint64_t submit(uint64_t page, uint64_t n, int priority, bool wake = true) {
        const store_read r = { 0, page * PAGE, n * PAGE, memory.data() + page * PAGE };
        return pool->submit(&r, 1, priority, nullptr, wake);
    }

    bool arrived(uint64_t page, uint64_t n) const { return std::memcmp(memory.data() + page * PAGE, file.content.data() + page * PAGE, n * PAGE) == 0; }

    bool done_soon(uint64_t ticket) {
        return soon([&] { return pool->done(ticket); });
    }

    bool wait(uint64_t ticket) { return pool->wait(ticket, error); }
};

static void test_four_priorities() {
    scene s(1);
    s.port->hold(0, PAGE);
    const uint64_t first = s.submit(0, 1, 3); // the reader is busy with it, and then serves the others in their order
    CHECK(soon([&] { return s.port->n_reading() == 1; }));
    // what is out of range is the first or the last
    const int             priorities[] = { 3, 1, 99, 2, 0, 1, -7, 3, 0 };
    std::vector<uint64_t> tickets;
    for (uint64_t i = 0; i < 9; i++) {
        tickets.push_back(s.submit(10 * (i + 1), 3, priorities[i]));
    }
    s.port->let_go();
    for (const uint64_t t : tickets) {
        CHECK(s.done_soon(t)); // without a wait, which would hurry it
    }
    std::vector<uint64_t> expected = { 0 };
    for (const uint64_t i : { 4, 6, 8, 1, 5, 3, 0, 2, 7 }) {
        for (uint64_t page = 10 * (i + 1); page < 10 * (i + 1) + 3; page++) {
            expected.push_back(page * PAGE);
        }
    }
    CHECK(s.port->take_offsets() == expected);
    CHECK(s.wait(first));
    for (const uint64_t t : tickets) {
        CHECK(s.wait(t));
    }
}

// While something is read, what is needed at the same time or sooner is read beside it, and nothing else. All are served.
static void test_not_beside_what_is_needed_sooner() {
    scene           s(4);
    std::mt19937_64 rng(31);
    for (int round = 0; round < 16; round++) {
        const int held = round % 4;
        s.port->hold(0, PAGE);
        std::vector<uint64_t> tickets    = { s.submit(0, 1, held) };
        std::vector<int>      priorities = { held };
        CHECK(soon([&] { return s.port->n_reading() == 1; }));
        for (int i = 0; i < 12; i++) {
            priorities.push_back((int) (rng() % 4));
            tickets.push_back(s.submit(10 + 10 * i, 1 + rng() % 8, priorities.back(), rng() % 2));
        }
        s.pool->wake();
        const auto cancelled = 1 + rng() % 12;
        s.pool->cancel(tickets[cancelled]);
        for (size_t i = 1; i < tickets.size(); i++) {
            CHECK(priorities[i] > held || s.done_soon(tickets[i]));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        for (size_t i = 1; i < tickets.size(); i++) {
            CHECK(priorities[i] <= held || i == cancelled || !s.pool->done(tickets[i]));
        }
        for (const uint64_t offset : s.port->take_offsets()) {
            CHECK(offset == 0 || priorities[offset / PAGE / 10] <= held);
        }
        s.port->let_go();
        for (const uint64_t t : tickets) {
            CHECK(s.done_soon(t) && s.wait(t) == (t != tickets[cancelled]));
        }
        s.port->take_offsets();
    }
}

// Tickets that nobody was told of are served after wake(), by a wait, or with what is submitted later.
static void test_wake() {
    scene                 s(4);
    std::vector<uint64_t> tickets;
    const auto            all_done = [&] {
        return std::all_of(tickets.begin(), tickets.end(), [&](uint64_t t) { return s.done_soon(t) && s.wait(t); });
    };
    // A reader that just begins, or that was woken for something that another has taken, looks for itself: then once more.
    const auto submit_silently = [&] {
        for (int i = 0; i < 20; i++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            s.port->take_offsets();
            tickets.clear();
            for (const int priority : { 2, 0, 3, 1, 0 }) {
                tickets.push_back(s.submit(20 * tickets.size(), 8, priority, false));
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            if (s.port->take_offsets().empty()) {
                return true;
            }
            s.pool->wake();
            CHECK(all_done());
        }
        return false;
    };
    CHECK(submit_silently());
    s.pool->wake();
    CHECK(all_done() && s.arrived(0, 8) && s.arrived(80, 8));

    for (size_t i = 0; i < 5; i++) {
        CHECK(submit_silently());
        auto waits = std::async(std::launch::async, [&] { return s.wait(tickets[i]); });
        CHECK(soon([&] { return waits.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
        s.pool->wake(); // for a test that fails
        CHECK(waits.get());
        tickets.erase(tickets.begin() + (std::ptrdiff_t) i);
        CHECK(all_done());
    }

    CHECK(submit_silently());
    tickets.push_back(s.submit(200, 1, 3));
    CHECK(all_done());

    // and what is cancelled takes nobody's turn
    CHECK(submit_silently());
    s.pool->wake();
    s.pool->cancel(tickets[1]);
    s.pool->cancel(tickets[3]);
    for (const size_t i : { 0, 2, 4 }) {
        CHECK(s.done_soon(tickets[i]) && s.wait(tickets[i]));
    }
    s.pool->wake(); // with nothing to do
}

// Readers that stay idle beside what is needed sooner.
static void test_idle_readers() {
    scene      s(4);
    const auto hold_one = [&] {
        s.port->hold(0, PAGE);
        const uint64_t held = s.submit(0, 1, 0);
        CHECK(soon([&] { return s.port->n_reading() == 1; }));
        return held;
    };
    // whoever waits is served at once, also beside a read that takes long
    uint64_t held  = hold_one();
    uint64_t ahead = s.submit(10, 8, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK(s.port->n_reading() == 1 && !s.pool->done(ahead));
    auto waits = std::async(std::launch::async, [&] { return s.wait(ahead); });
    CHECK(soon([&] { return waits.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }));
    CHECK(!s.pool->done(held));
    s.port->let_go();
    CHECK(waits.get() && s.arrived(10, 8));
    std::string error;
    CHECK(s.pool->wait(held, error));

    // when it has come, all of them go on; also when the next in turn is cancelled meanwhile
    for (const bool cancelled : { false, true }) {
        s.port->delay_us    = 3000;
        held                = hold_one();
        const uint64_t next = s.submit(300, 1, 1);
        ahead               = s.submit(10, 40, 3);
        if (cancelled) {
            s.pool->cancel(next);
        }
        s.port->let_go();
        CHECK(soon([&] { return s.port->n_reading() == 4; }));
        CHECK(s.done_soon(ahead) && s.wait(ahead) && s.wait(held) && s.wait(next) == !cancelled);
    }
}

// What is needed last is waited for, while there is enough for seconds that is needed sooner.
static void test_nobody_starves() {
    scene s(2);
    s.port->delay_us = 1000;
    std::vector<uint64_t> sooner;
    for (int i = 0; i < 1000; i++) {
        sooner.push_back(s.submit(0, 4, 1));
    }
    const uint64_t last = s.submit(100, 4, 3);
    CHECK(s.wait(last) && s.arrived(100, 4));
    CHECK(!s.pool->done(sooner.back()));
    for (const uint64_t t : sooner) {
        s.pool->cancel(t);
    }
}

// A reader that was left behind and has no successor: the other, which was idle because of it, is called.
static void test_stuck_beside_an_idle_reader() {
    scene s(2, 20);
    s.port->hold(0, PAGE);
    for (int i = 0; i < 64; i++) { // as many as are replaced
        CHECK(!s.wait(s.submit(0, 1, 0)));
    }
    const uint64_t stuck = s.submit(0, 1, 0);
    CHECK(soon([&] { return s.port->n_reading() == 65; }));
    const uint64_t ahead = s.submit(10, 4, 1);
    CHECK(!s.wait(stuck) && s.pool->n_threads() == 1);
    CHECK(s.done_soon(ahead) && s.wait(ahead) && s.arrived(10, 4));
    s.port->let_go();
    CHECK(soon([&] { return s.port->n_reading() == 0 && s.pool->n_threads() == 2; }));
}

void test_turns() {
    test_four_priorities();
    test_not_beside_what_is_needed_sooner();
    test_wake();
    test_idle_readers();
    test_nobody_starves();
    test_stuck_beside_an_idle_reader();
}
