// The feed: experts from a real file, through the reader pool, into slots that are used several times in an event, by threads
// of random speed. Every thread looks at an expert when it has got it and again before it leaves it.
//
// It takes the place of mul_mat_id: see ggml_cpu_matrix_hooks. Prints a line per failed check and a closing 'N passed, N failed'.

#include "feed_helpers.h"

#include <cstdlib>

const ggml_cpu_matrix_hooks * hooks = nullptr;

// ggml-cpu's; what the feed tells it comes here
extern "C" void ggml_cpu_set_matrix_hooks(const struct ggml_cpu_matrix_hooks * h) {
    hooks = h;
}

// Nothing here takes long: a test that does has lost a wake-up.
static std::atomic<int> progress { 0 };

static void watch() {
    std::thread([] {
        for (int last = -1; last != progress;) {
            last = progress;
            std::this_thread::sleep_for(std::chrono::seconds(60));
        }
        std::printf("FAILED: nothing happened for a minute\n");
        std::fflush(stdout);
        std::_Exit(1);
    }).detach();
}

static constexpr std::array<int64_t, 3> SMALL  = { 1500, 9000, 6016 };    // some in one piece, none aligned
static constexpr std::array<int64_t, 3> PIECES = { 40000, 40960, 24064 }; // each in several
static constexpr uint64_t               PIECE  = 16384;

// An event from begin to end, without errors.
static void run_event(user & u, int n_experts, int n_threads, outcome & sum) {
    u.plan(n_experts);
    u.feed->begin(u.items);
    if (u.below(4) == 0) {
        sum.n_failed += !u.feed->wait_for_first_reads();
    }
    const outcome out = u.compute(n_threads);
    sum.n_wrong      += out.n_wrong;
    sum.n_failed     += out.n_failed;
    sum.n_split      += out.n_split;
    size_t n_incomplete;
    sum.n_failed += !u.end(&n_incomplete).empty() || n_incomplete > 0;
    sum.n_wrong  += !u.intact();
    progress++;
}

static bool is_clean(const outcome & out) {
    if (out.n_wrong + out.n_failed + out.n_split > 0) {
        std::printf("%d wrong, %d failed, %d split\n", out.n_wrong, out.n_failed, out.n_split);
        return false;
    }
    return true;
}

static void test_random_events(const std::array<int64_t, 3> & sizes, int32_t n_slots, int n_threads, int32_t n_readers, const file_faults & faults) {
    bank b("feed.bin", sizes, 20);
    auto port = std::make_shared<fault_port>();
    port->set_faults(faults);
    const std::shared_ptr<reader_pool> readers = make_pool(n_readers, store_direct::automatic, 60000, port, PIECE, true);
    user                               u(b, readers, n_slots, 100 * n_slots + n_threads);
    outcome                            sum;
    uint64_t                           n_evicting = 0;
    for (int i = 0; i < 6; i++) {
        const int n = i % 3 == 2 ? bank::N_EXPERT : u.below(bank::N_EXPERT + 1); // of nothing, too: a warm-up
        n_evicting += n > n_slots;
        run_event(u, n, n_threads, sum);
    }
    CHECK(is_clean(sum));
    CHECK(n_evicting > 0 || n_slots == bank::N_EXPERT);
    // each expert is read once for each tensor, and no more
    CHECK(readers->counters().bytes == u.n_misses * (b.expert_bytes(0) + b.expert_bytes(1) + b.expert_bytes(2)));
    CHECK(readers->counters().errors == 0 && !u.stream->stuck());
}

static void test_all_random_events() {
    for (const int n_threads : { 1, 2, 4, 8, 0 }) {
        for (const int32_t n_slots : { 1, 2, 5, (int) bank::N_EXPERT }) {
            file_faults faults;
            test_random_events(SMALL, n_slots, n_threads, 8, faults);
            faults.delay_us     = n_slots == 1 ? 0 : 100; // the disk is slower than the threads, or not
            faults.longest_read = n_slots == 2 ? 5000 : 0; // short reads
            test_random_events(PIECES, n_slots, n_threads, n_slots == 5 ? 1 : 4, faults);
        }
    }
}

// Two contexts share the readers; the disk is slow, so that one waits for what the other asked for later.
static void test_two_users() {
    bank b("feed.bin", PIECES, 21);
    auto port = std::make_shared<fault_port>();
    port->set_faults({ 0, 1, 5, 0, 200 });
    const std::shared_ptr<reader_pool> readers = make_pool(3, store_direct::automatic, 60000, port, PIECE, true);
    user                               first(b, readers, 3, 1), second(b, readers, 7, 2);
    outcome                            sums[2];
    std::thread                        other([&] {
        for (int i = 0; i < 25; i++) {
            run_event(second, 20, 2, sums[1]);
        }
    });
    for (int i = 0; i < 25; i++) {
        run_event(first, 12, 3, sums[0]);
    }
    other.join();
    CHECK(is_clean(sums[0]));
    CHECK(is_clean(sums[1]));
}

// A computation that is given up: between two ops, before any, or with the context.
static void test_abandoned() {
    bank b("feed.bin", PIECES, 22);
    auto port = std::make_shared<fault_port>();
    port->set_faults({ 0, 1, 5, 0, 500 });
    const std::shared_ptr<reader_pool> readers = make_pool(4, store_direct::automatic, 60000, port, PIECE, true);
    user                               u(b, readers, 5, 3);
    outcome                            sum;
    uint64_t                           n_dropped = 0;
    for (int i = 0; i < 24; i++) {
        u.plan(3 + u.below(bank::N_EXPERT - 2));
        u.feed->begin(u.items);
        CHECK(is_clean(u.compute(2, u.below(bank::N_TENSORS))));
        size_t n_incomplete;
        CHECK(u.end(&n_incomplete).empty());
        n_dropped += n_incomplete;
        CHECK(u.intact());
        CHECK(u.feed->end().empty() && u.feed->error().empty()); // and it is over
        run_event(u, 12, 2, sum);
    }
    CHECK(is_clean(sum) && n_dropped > 24);
    u.plan(bank::N_EXPERT);
    u.feed->begin(u.items);
    u.feed.reset(); // with its reads
    const auto at_end = u.memory;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(u.memory == at_end && readers->counters().errors == 0);
}

// EIO at any read: all threads hear of it or none, an error says what was read, and the next event is right.
static void test_read_errors(int n_threads) {
    bank                               b("feed.bin", PIECES, 23);
    auto                               port    = std::make_shared<fault_port>();
    const std::shared_ptr<reader_pool> readers = make_pool(4, store_direct::automatic, 60000, port, PIECE, true);
    user                               u(b, readers, 6, 40 + n_threads);
    outcome                            sum;
    int                                n_errors = 0, n_late = 0;
    for (int i = 0; i < 30; i++) {
        file_faults f;
        f.fail_from  = 1 + u.below(i % 3 == 0 ? 8 : 150);
        f.fail_count = u.below(4) == 0 ? 2 : 100000;
        f.delay_us   = u.below(2) ? 0 : 200;
        u.plan(4 + u.below(bank::N_EXPERT - 3));
        port->set_faults(f);
        u.feed->begin(u.items);
        // some are found out before anything is computed
        const bool    found = u.below(4) == 0 && !u.feed->wait_for_first_reads();
        const outcome out   = found ? outcome() : u.compute(n_threads);
        const bool    fails = found || out.n_failed > 0;
        CHECK(out.n_wrong == 0 && out.n_split == 0);
        size_t            n_incomplete;
        const std::string why = u.end(&n_incomplete);
        CHECK(fails ? n_incomplete > 0 : n_incomplete == 0 && why.empty());
        if (fails) {
            CHECK_HAS(why, "_exps.weight expert ");
            CHECK_HAS(why, "of " + b.file.path + " failed: ");
            CHECK_HAS(why, "errno 5");
            n_errors++;
            n_late += f.fail_from > 60;
        }
        port->set_faults({});
        CHECK(u.intact());
        CHECK(u.end().empty()); // an error is told once
        run_event(u, 16, n_threads, sum);
    }
    CHECK(is_clean(sum));
    CHECK(n_errors > 15 && n_late > 0);
}

// A reader that does not come back: an error after the time limit. Read in place, the slots cannot be used any more.
static void test_stuck_reader(bool in_place) {
    bank                         b("feed.bin", PIECES, 24);
    auto                         port    = std::make_shared<fault_port>();
    std::shared_ptr<reader_pool> readers = make_pool(4, store_direct::automatic, 400, port, PIECE, in_place);
    user                         u(b, readers, 6, 5);
    outcome                      sum;
    run_event(u, 16, 4, sum);
    for (const uint64_t when : { 1, 12 }) {
        file_faults f;
        f.stick_from = when;
        port->set_faults(f);
        u.plan(20);
        u.feed->begin(u.items);
        const auto    begin = std::chrono::steady_clock::now();
        const outcome out   = u.compute(4);
        CHECK(out.n_failed == 4 && out.n_wrong == 0 && out.n_split == 0);
        const std::string why = u.end();
        CHECK_HAS(why, "a reader is stuck");
        CHECK(seconds_since(begin) < 10 && port->n_stuck() == 1);
        CHECK(u.stream->stuck() == in_place);
        if (!in_place) {
            CHECK(u.intact());
            run_event(u, 16, 4, sum); // beside it
        }
        port->release();
        CHECK(soon([&] { return port->n_stuck() == 0; }));
        progress++;
    }
    CHECK(is_clean(sum));
    u.feed.reset();
    u.stream.reset();
    readers.reset();
    CHECK(soon([&] { return port->n_open() == 0; })); // nobody writes to the slots from now on
}

// Which weights are fed, and with what.
static void test_hooks() {
    bank                               b("feed.bin", SMALL, 25);
    const std::shared_ptr<reader_pool> readers = make_pool(2, store_direct::automatic, 60000, nullptr);
    user                               u(b, readers, 4, 6), v(b, readers, 4, 7);
    std::vector<void *>                sources;
    for (user * w : { &u, &v }) {
        for (int t = 0; t < bank::N_TENSORS; t++) {
            CHECK(!hooks->find(w->slots[t]) && !hooks->find(b.tensors[t]));
            CHECK(w->stand_ins[t]->data == w->slots[t]->data && w->stand_ins[t]->nb[2] == w->slots[t]->nb[2]);
            sources.push_back(hooks->find(w->stand_ins[t]));
            CHECK(sources.back() && std::count(sources.begin(), sources.end(), sources.back()) == 1);
        }
    }
    u.plan(7);
    v.plan(3);
    u.feed->begin(u.items);
    v.feed->begin(v.items);
    for (size_t i = 0; i < sources.size(); i++) {
        const auto &    items = i < 3 ? u.items : v.items;
        int             n     = 0;
        const int32_t * order = hooks->order(sources[i], &n);
        CHECK((size_t) n == items.size() && std::equal(order, order + n, items.begin(), [](int32_t e, const auto & item) { return e == item.expert; }));
    }
}

// The test of the test: each of the feed's own faults is seen.
static void test_faults_are_seen() {
#if !defined(__SANITIZE_THREAD__) // it sees them, too, and says so
    for (bool expert_feed::* const fault : { &expert_feed::lose_reads, &expert_feed::next_slot, &expert_feed::reuse_early }) {
        bank b("feed.bin", PIECES, 26);
        auto port = std::make_shared<fault_port>();
        port->set_faults({ 0, 1, 5, 0, fault == &expert_feed::lose_reads ? 2000u : 0u });
        const std::shared_ptr<reader_pool> readers = make_pool(4, store_direct::automatic, 60000, port, PIECE, true);
        user                               u(b, readers, 4, 8);
        (*u.feed).*fault = true;
        int n_wrong      = 0;
        for (int i = 0; i < 5; i++) {
            u.plan(bank::N_EXPERT);
            u.feed->begin(u.items);
            n_wrong += u.compute(2).n_wrong;
            u.end();
            progress++;
        }
        CHECK(n_wrong > 0);
    }
#endif
}

int main(int, char ** argv) {
    folder = fs::absolute(argv[0]).parent_path() / "test-feed-files";
    fs::create_directories(folder);
    watch();
    test_hooks();
    test_all_random_events();
    test_two_users();
    test_abandoned();
    for (const int n_threads : { 1, 2, 4, 8 }) {
        test_read_errors(n_threads);
    }
    test_stuck_reader(false);
    test_stuck_reader(true);
    test_faults_are_seen();
    fs::remove_all(folder);
    std::printf("%d passed, %d failed\n", n_passed.load(), n_failed.load());
    return n_failed == 0 ? 0 : 1;
}
