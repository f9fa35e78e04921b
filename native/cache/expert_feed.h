#pragma once

// Streamed experts that the CPU computes: its mul_mat_id asks for them one after the other, those first that are in a slot, and
// meanwhile the others are read, also into slots of experts that have been computed.
//
// Each tensor of the bank goes through the event's experts by itself, since all experts of one tensor are computed before any of
// the next: the same slots at other times. An expert is read once for each tensor.

#include "expert_stream.h"

#include "ggml-cpu.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

class expert_feed {
  public:
    // One expert of an event, in the order in which they are computed.
    struct item {
        int32_t expert;
        int32_t slot;
        bool    read; // it is not there yet
    };

    // `slots`: per tensor, where slot 0 is; slots lie `expert_bytes` of the tensor apart.
    expert_feed(expert_stream & stream, const std::vector<ggml_tensor *> & slots);
    ~expert_feed();

    expert_feed(const expert_feed &)             = delete;
    expert_feed & operator=(const expert_feed &) = delete;

    // What stands for tensor t in a graph: as many experts as the model has, whose ids it takes, at the address of the slots.
    // mul_mat_id finds the feed through it.
    void stand_in(int32_t t, ggml_tensor * tensor);

    // An event begins: its experts are computed in this order, and reading starts. An item may take the slot of an earlier one.
    void begin(const std::vector<item> & event);

    // Wait for what can be read before anything is computed. false: some of it could not be had.
    bool wait_for_first_reads();

    // The event is over, complete or not, and its error forgotten. Returns those of its items that may be incomplete: their slots
    // hold nothing of use.
    std::vector<item> end();

    // Why an expert of the event could not be had; empty if all could.
    std::string error() const;

    // for tests: use experts without waiting for them; the slot after theirs; slots before all threads have left them
    bool lose_reads  = false;
    bool next_slot   = false;
    bool reuse_early = false;

  private:
    enum : uint8_t { TO_READ,
                     READING,
                     THERE,
                     FAILED };

    struct part { // of an item, in one tensor
        std::atomic<uint8_t>  state      = { THERE };
        std::atomic<int32_t>  n_released = { 0 };    // threads that have left it
        std::atomic<uint64_t> ticket     = { 0 };
        bool                  waited_on  = false;    // by a thread that will say when it has come
    };

    struct source { // of one tensor: what mul_mat_id finds
        expert_feed * feed;
        int32_t       t;
    };

    static void *          find(const ggml_tensor * weight);
    static const int32_t * order(void * source, int * n);
    static int             acquire(void * source, int k);
    static void            release(void * source, int k, int n_threads);

    int32_t acquire_part(int32_t t, int32_t k);
    void    release_part(int32_t t, int32_t k, int32_t n_threads);
    bool    wait(int32_t t, int32_t k);
    bool    start_reads(int32_t t, int32_t priority); // whether there were any
    part &  at(int32_t t, size_t k) { return parts[t * items.size() + k]; }

    expert_stream &                  stream;
    const std::vector<ggml_tensor *> slots;
    std::vector<source>              sources;
    std::vector<int32_t>             computed; // tensors, in this order

    std::vector<item>       items;
    std::vector<int32_t>    experts;        // of the items
    std::vector<int32_t>    last_in;        // scratch; per slot: the item that took it last
    std::vector<int32_t>    before;         // per item: the item whose slot it takes, -1 for none
    std::vector<uint8_t>    is_followed;    // per item: its slot is taken by a later one
    std::unique_ptr<part[]> parts;          // [tensor][item]
    size_t                  n_parts = 0;    // room in `parts`
    std::vector<size_t>     next;           // per tensor: the first item that may still have to be read
    int32_t                 n_threads = 0;  // of the computation; 0: not known yet
    bool                    failed    = false;
    std::string             why;
    mutable std::mutex      mutex;          // of all above that changes between begin and end
    std::condition_variable changed;
};
