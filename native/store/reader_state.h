#pragma once

// What is behind a reader_pool: the queues, and the threads that serve them. Private to native/store.

#include "store/reader.h"
#include "store/source_file.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

using steady     = std::chrono::steady_clock;
using time_point = steady::time_point;

// Pieces end at multiples of this in the file, so that two of them share neither a page nor a block.
constexpr uint64_t PIECE_ALIGNMENT = 4096;

struct reader_pool::piece {
    size_t    read; // index of the store_read that it is of
    uint64_t  offset;
    uint64_t  size;
    uint8_t * dst;
};

struct reader_pool::ticket {
    uint64_t                                  id       = 0;
    int                                       priority = 0;
    std::vector<store_read>                   reads;
    std::vector<std::string>                  names; // empty: none
    std::vector<std::shared_ptr<source_file>> files; // of the reads
    std::vector<piece>                        pieces;
    size_t                                    next      = 0; // piece that no reader has taken yet
    size_t                                    n_reading = 0; // pieces that a reader has
    bool                                      failed    = false;
    bool                                      cancelled = false;
    std::string                               error;
    time_point                                since; // it is in this queue

    bool finished() const { return next == pieces.size() && n_reading == 0; }

    std::string describe(size_t read) const {
        const store_read & r    = reads[read];
        const std::string  name = read < names.size() ? names[read] : "";
        return (name.empty() ? "" : name + ": ") + "reading " + std::to_string(r.size) + " bytes at offset " + std::to_string(r.offset) + " of " +
            (files[read] ? files[read]->path : "file " + std::to_string(r.file)) + " failed: ";
    }
};

struct reader_pool::reader {
    std::thread             thread;
    bounce_buffer           bounce;
    std::shared_ptr<ticket> at; // NULL: idle
    piece                   p = {};
    time_point              begin;
    bool                    copying = false; // not stuck: it will end soon
    bool                    exited  = false;
    std::atomic<bool>       wanted { true }; // false: left behind
};

// All members are guarded by the mutex, but for those that never change.
struct reader_pool::state {
    store_direct               direct     = store_direct::automatic;
    uint64_t                   timeout_ms = 0;
    uint64_t                   piece_size = 0; // bytes
    bool                       in_place   = false;
    size_t                     n_threads  = 0;
    std::shared_ptr<file_port> port;

    mutable std::mutex      mutex;
    std::condition_variable work;  // for readers
    std::condition_variable ended; // for those who wait: a ticket, a copy or a reader came to its end

    std::vector<std::shared_ptr<source_file>>   files;
    std::map<uint64_t, std::shared_ptr<ticket>> tickets; // not waited for yet
    std::deque<std::shared_ptr<ticket>>         queues[N_PRIORITIES];
    size_t                                      n_queued = 0; // pieces
    uint64_t                                    last_id  = 0;
    std::vector<std::shared_ptr<reader>>        readers;
    size_t                                      n_stuck = 0;
    std::map<uint64_t, int32_t>                 in_use; // by ticket: stuck readers that read to its dst
    time_point                                  progress; // of any reader
    store_counters                              count;
    bool                                        stop = false;

    static bool start_reader(const std::shared_ptr<state> & s);
    static void run_reader(std::shared_ptr<state> s, std::shared_ptr<reader> r);

    // the rest is called with the mutex held
    std::string prepare(ticket & t, size_t read); // why it cannot be read; empty: it is cut into pieces
    void        enqueue(const std::shared_ptr<ticket> & t);
    void        drop_queued(const std::shared_ptr<ticket> & t);
    void        fail(const std::shared_ptr<ticket> & t, size_t read, const std::string & why);
    int         to_serve() const; // the queue whose pieces may be read now; -1: none
    void        take_piece(reader & r);
    size_t      n_wanted() const; // readers that there is work for
    void        call_readers(size_t n_here = 0); // those that are idle, but for n_here that come by themselves
    void        count_reads(const read_outcome & out);
    void        end_piece(reader & r, const read_outcome & out);
    void        leave_stuck_behind(const std::shared_ptr<state> & self);
    time_point  next_timeout() const;
    void        wait_for(const std::shared_ptr<state> & self, std::unique_lock<std::mutex> & lock, const std::shared_ptr<ticket> & t);

    std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms); }
};
