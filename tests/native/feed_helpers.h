#pragma once

// What the test of the feed shares: a bank whose experts lie in a file, and threads that do with it what mul_mat_id does.

#include "cache/expert_feed.h"
#include "cache/expert_stream.h"
#include "store/stream_buffer.h"
#include "store_helpers.h"

#include "ggml-cpp.h"

#include <array>
#include <condition_variable>
#include <memory>
#include <mutex>

extern const ggml_cpu_matrix_hooks * hooks; // what the feed gave ggml

// The experts of one bank, in a file between other bytes; tensors that stand for them, as in a model that streams.
struct bank {
    static constexpr int N_TENSORS = 3;
    static constexpr int N_EXPERT  = 24;

    temporary                  file;
    ggml_context_ptr           ctx;
    ggml_backend_buffer_ptr    buffer;
    std::vector<ggml_tensor *> tensors;
    std::array<uint64_t, 3>    offsets = {}; // in the file, of expert 0

    // expert_bytes: of gate, up, down
    bank(const char * name, const std::array<int64_t, 3> & expert_bytes, uint64_t seed)
        : file(name, N_EXPERT * (expert_bytes[0] + expert_bytes[1] + expert_bytes[2]) + 4096, seed) {
        ggml_init_params params = {};
        params.mem_size         = 16 * ggml_tensor_overhead();
        params.no_alloc         = true;
        ctx.reset(ggml_init(params));
        uint64_t offset = 1056;
        for (int t = 0; t < N_TENSORS; t++) {
            ggml_tensor * tensor = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_I8, expert_bytes[t], 1, N_EXPERT);
            ggml_format_name(tensor, "blk.0.ffn_%s_exps.weight", t == 0 ? "gate" : t == 1 ? "up" :
                                                                                            "down");
            tensors.push_back(tensor);
            offsets[t] = offset;
            offset    += N_EXPERT * expert_bytes[t] + 32 * t;
        }
        buffer.reset(ggml_backend_buft_alloc_buffer(stream_buffer_type(), file.content.size()));
        char * base = (char *) ggml_backend_buffer_get_base(buffer.get());
        for (int t = 0; t < N_TENSORS; t++) {
            ggml_backend_tensor_alloc(buffer.get(), tensors[t], base + offsets[t] / 64 * 64);
            streamed_experts_of(tensors[t])->add(tensors[t], file.path.c_str(), offsets[t], N_EXPERT * tensors[t]->nb[2]);
        }
    }

    uint64_t        expert_bytes(int t) const { return tensors[t]->nb[2]; }
    const uint8_t * expert(int t, int32_t e) const { return file.content.data() + offsets[t] + e * expert_bytes(t); }
};

// Where the threads of an op wait for each other.
class meeting {
  public:
    explicit meeting(int n) : n(n) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        const int                    turn = turns;
        if (++here == n) {
            here = 0;
            turns++;
            all.notify_all();
        }
        all.wait(lock, [&] { return turns != turn; });
    }

  private:
    const int               n;
    int                     here  = 0;
    int                     turns = 0;
    std::mutex              mutex;
    std::condition_variable all;
};

// How an event was computed.
struct outcome {
    int n_wrong  = 0; // looks at an expert that saw other bytes than its own
    int n_failed = 0; // threads that were told that the op fails
    int n_split  = 0; // ops in which some were told so, and others not
};

// One context over a bank: its slots, which expert is where, and the feed.
struct user {
    bank &                              b;
    const int32_t                       n_slots;
    std::unique_ptr<expert_stream>      stream;
    std::vector<bytes>                  memory;
    ggml_context_ptr                    ctx;
    std::vector<ggml_tensor *>          slots;
    std::vector<ggml_tensor *>          stand_ins;
    std::unique_ptr<expert_feed>        feed;
    std::array<int32_t, bank::N_EXPERT> slot_of;
    std::vector<int32_t>                expert_in;
    std::vector<expert_feed::item>      items; // of the event
    std::mt19937_64                     rng;
    uint64_t                            n_misses = 0; // of all events

    user(bank & b, const std::shared_ptr<reader_pool> & readers, int32_t n_slots, uint64_t seed) : b(b), n_slots(n_slots), expert_in(n_slots, -1), rng(seed) {
        slot_of.fill(-1);
        std::string error;
        stream = expert_stream::create(b.tensors, readers, error);
        CHECK(stream && error.empty());
        ggml_init_params params = {};
        params.mem_size         = 16 * ggml_tensor_overhead();
        params.no_alloc         = true;
        ctx.reset(ggml_init(params));
        for (int t = 0; t < bank::N_TENSORS; t++) {
            // reads are in place where slots lie as the file does
            const uint64_t size = b.expert_bytes(t);
            memory.emplace_back(n_slots * size + 2 * 4096, 0);
            const size_t at = ((uintptr_t) memory[t].data()) % 4096;
            slots.push_back(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_I8, (int64_t) size, 1, n_slots));
            slots[t]->data = memory[t].data() + (4096 - at) + stream->phase_of(t, 4096);
            ggml_format_name(slots[t], "%s (slots)", b.tensors[t]->name);
        }
        feed = std::make_unique<expert_feed>(*stream, slots);
        for (int t = 0; t < bank::N_TENSORS; t++) {
            stand_ins.push_back(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_I8, slots[t]->ne[0], 1, bank::N_EXPERT));
            feed->stand_in(t, stand_ins[t]);
        }
    }

    int below(int n) { return (int) (rng() % (uint64_t) n); }

    // Give n random experts slots: those that are there come first, or lie between others; a slot is free when the items that
    // use it are past.
    void plan(int32_t n) {
        std::vector<int32_t> experts(bank::N_EXPERT);
        for (int32_t e = 0; e < bank::N_EXPERT; e++) {
            experts[e] = e;
        }
        std::shuffle(experts.begin(), experts.end(), rng);
        experts.resize(n);
        const auto    is_hit = [&](int32_t e) { return slot_of[e] >= 0; };
        const auto    misses = std::stable_partition(experts.begin(), experts.end(), is_hit);
        const int32_t n_hits = (int32_t) (misses - experts.begin());
        if (n_hits < n_slots && below(2)) {
            std::shuffle(experts.begin(), experts.end(), rng);
        }
        std::vector<uint8_t> taken(n_slots, 0); // by a hit that comes
        for (const int32_t e : experts) {
            if (is_hit(e)) {
                taken[slot_of[e]] = 1;
            }
        }
        const bool tight = below(3) == 0; // always the slot of the item before, if it can be had
        items.clear();
        for (const int32_t e : experts) {
            if (is_hit(e)) {
                taken[slot_of[e]] = 0;
                items.push_back({ e, slot_of[e], false });
                continue;
            }
            int32_t slot = tight && !items.empty() ? items.back().slot : below(n_slots);
            while (taken[slot]) {
                slot = below(n_slots);
            }
            drop(expert_in[slot]);
            slot_of[e]      = slot;
            expert_in[slot] = e;
            items.push_back({ e, slot, true });
            n_misses++;
        }
    }

    void drop(int32_t e) {
        if (e >= 0 && slot_of[e] >= 0) {
            expert_in[slot_of[e]] = -1;
            slot_of[e]            = -1;
        }
    }

    bool holds(int t, int32_t slot, int32_t e) const {
        return std::memcmp((const char *) slots[t]->data + slot * slots[t]->nb[2], b.expert(t, e), b.expert_bytes(t)) == 0;
    }

    // Do what the threads of mul_mat_id do, for n_ops of the event's tensors in a random order. n_threads of 0: as many as an op
    // happens to get.
    outcome compute(int n_threads, int n_ops = bank::N_TENSORS) {
        std::array<int, 3> order = { 0, 1, 2 };
        std::shuffle(order.begin(), order.end(), rng);
        outcome          out;
        std::atomic<int> n_wrong { 0 };
        for (int op = 0; op < n_ops && out.n_failed == 0; op++) {
            const int                n = n_threads > 0 ? n_threads : 1 << below(4);
            std::atomic<int>         n_failed { 0 };
            meeting                  begin(n);
            std::vector<std::thread> threads;
            for (int i = 0; i < n; i++) {
                threads.emplace_back([&, i, seed = rng()] {
                    std::mt19937_64 mine(seed + i);
                    begin.wait();
                    n_failed += !compute_op(order[op], n, mine, n_wrong);
                });
            }
            for (auto & t : threads) {
                t.join();
            }
            out.n_failed = n_failed;
            out.n_split += n_failed > 0 && n_failed < n;
        }
        out.n_wrong = n_wrong;
        return out;
    }

    // The event is over. Returns what went wrong.
    std::string end(size_t * n_incomplete = nullptr) {
        const std::string why = feed->error();
        const auto        bad = feed->end();
        for (const auto & i : bad) {
            if (slot_of[i.expert] == i.slot) {
                drop(i.expert);
            }
        }
        if (n_incomplete) {
            *n_incomplete = bad.size();
        }
        return why;
    }

    // What should be there is.
    bool intact() const {
        bool ok = true;
        for (int32_t s = 0; s < n_slots; s++) {
            for (int t = 0; t < bank::N_TENSORS && expert_in[s] >= 0; t++) {
                ok = ok && holds(t, s, expert_in[s]);
            }
        }
        return ok;
    }

  private:
    static void dawdle(std::mt19937_64 & rng) {
        switch (rng() % 16) {
            case 0:  std::this_thread::sleep_for(std::chrono::microseconds(rng() % 200)); break;
            case 1:  std::this_thread::yield(); break;
            default: break;
        }
    }

    // One thread of one op, as in ggml_compute_forward_mul_mat_id. false: it fails.
    bool compute_op(int t, int n_threads, std::mt19937_64 & rng, std::atomic<int> & n_wrong) const {
        void * const    source = hooks->find(stand_ins[t]);
        int             n      = 0;
        const int32_t * order  = hooks->order(source, &n);
        for (int k = 0; k < n; k++) {
            if (k > 0) {
                hooks->release(source, k - 1, n_threads);
            }
            const int place = hooks->acquire(source, k);
            if (place < 0) {
                return false;
            }
            n_wrong += !holds(t, place, order[k]);
            dawdle(rng);
            n_wrong += !holds(t, place, order[k]); // and stays
        }
        if (n > 0) {
            hooks->release(source, n - 1, n_threads);
        }
        return true;
    }
};
