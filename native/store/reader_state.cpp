#include "store/reader_state.h"

#include <algorithm>
#include <cstring>
#include <system_error>

// Readers that may be stuck at once, and are replaced. With more of them the disk is gone.
constexpr size_t MAX_STUCK = 64;

static uint64_t nanoseconds_since(time_point begin) {
    return (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(steady::now() - begin).count();
}

bool reader_pool::state::start_reader(const std::shared_ptr<state> & s) {
    auto r = std::make_shared<reader>();
    try {
        s->readers.push_back(r);
        r->thread = std::thread(run_reader, s, r);
    } catch (const std::system_error &) {
        s->readers.pop_back();
        return false;
    }
    return true;
}

void reader_pool::state::run_reader(std::shared_ptr<state> s, std::shared_ptr<reader> r) {
    s->port->thread_begins();
    std::unique_lock<std::mutex> lock(s->mutex);
    while (true) {
        s->work.wait(lock, [&] { return s->stop || s->to_serve() >= 0 || !r->wanted; });
        if (s->stop || !r->wanted) {
            break;
        }
        s->take_piece(*r);
        const std::shared_ptr<ticket> t    = r->at;
        source_file * const           file = t->files[r->p.read].get();

        lock.unlock();
        const read_outcome out = file->read(r->p.offset, r->p.size, r->p.dst, s->in_place, r->bounce, r->wanted);
        lock.lock();

        s->count.read_ns += nanoseconds_since(r->begin);
        if (!r->wanted) { // its ticket has failed without it, and its dst may be somebody else's by now
            s->count_reads(out);
            if (s->in_place && --s->in_use[t->id] == 0) {
                s->in_use.erase(t->id);
            }
            s->n_stuck--;
            if (!s->stop && s->readers.size() < s->n_threads) {
                start_reader(s); // it could not be replaced then
            }
            break;
        }
        if (out.error.empty() && !t->failed && !t->cancelled) {
            r->copying = true; // until then nobody may give the ticket up
            lock.unlock();
            for (int32_t i = 0; i < out.n_copies; i++) {
                std::memcpy(out.copies[i].to, out.copies[i].from, out.copies[i].size);
            }
            lock.lock();
            r->copying = false;
        }
        s->end_piece(*r, out);
    }
    r->exited = true;
    s->ended.notify_all();
}

// What is needed later would take bandwidth from what is needed sooner, so it is not read beside that.
int reader_pool::state::to_serve() const {
    for (int priority = 0; priority < N_PRIORITIES; priority++) {
        if (!queues[priority].empty()) {
            const auto sooner = [priority](const std::shared_ptr<reader> & r) { return r->at && r->at->priority < priority; };
            return std::any_of(readers.begin(), readers.end(), sooner) ? -1 : priority;
        }
    }
    return -1;
}

size_t reader_pool::state::n_wanted() const {
    const int priority = to_serve();
    size_t    n        = 0;
    if (priority >= 0) {
        for (const auto & t : queues[priority]) {
            n += t->pieces.size() - t->next;
        }
    }
    return std::min(n, readers.size());
}

void reader_pool::state::call_readers(size_t n_here) {
    for (size_t n = n_wanted(); n > n_here; n--) {
        work.notify_one();
    }
}

void reader_pool::state::take_piece(reader & r) {
    auto & queue = queues[to_serve()];
    r.at         = queue.front();
    r.p          = r.at->pieces[r.at->next++];
    r.begin      = steady::now();
    r.at->n_reading++;
    n_queued--;
    if (r.at->next == r.at->pieces.size()) {
        queue.pop_front();
    }
}

void reader_pool::state::count_reads(const read_outcome & out) {
    count.reads          += out.reads;
    count.retries        += out.retries;
    count.direct_bytes   += out.direct_bytes;
    count.buffered_bytes += out.buffered_bytes;
}

void reader_pool::state::end_piece(reader & r, const read_outcome & out) {
    const std::shared_ptr<ticket> t = std::move(r.at);
    r.at.reset();
    progress = steady::now();
    t->n_reading--;
    count_reads(out);
    if (out.error.empty()) {
        count.bytes          += r.p.size;
        count.in_place_bytes += out.in_place_bytes;
    } else {
        fail(t, r.p.read, out.error);
    }
    if (t->finished()) {
        ended.notify_all();
    }
    call_readers(1); // this one takes a piece, too
}

std::string reader_pool::state::prepare(ticket & t, size_t read) {
    const store_read & r = t.reads[read];
    if (r.file < 0 || (size_t) r.file >= files.size()) {
        return "there are " + std::to_string(files.size()) + " files";
    }
    t.files[read]          = files[(size_t) r.file];
    const uint64_t in_file = t.files[read]->identity.size;
    if (r.size > in_file || r.offset > in_file - r.size) {
        return "the file ends at " + std::to_string(in_file) + " bytes: it is truncated, or not the one that this was planned for";
    }
    if (!r.dst && r.size > 0) {
        return "there is no place for them";
    }
    // pieces of about the same size
    const uint64_t n    = std::max<uint64_t>(1, (r.size + piece_size - 1) / piece_size);
    uint64_t       from = r.offset;
    for (uint64_t i = 1; i <= n; i++) {
        uint64_t to = r.offset + r.size;
        if (i < n) {
            to  = r.offset + r.size / n * i;
            to -= to % PIECE_ALIGNMENT;
        }
        if (to > from) {
            t.pieces.push_back({ read, from, to - from, (uint8_t *) r.dst + (from - r.offset) });
            from = to;
        }
    }
    return "";
}

void reader_pool::state::enqueue(const std::shared_ptr<ticket> & t) {
    if (t->next < t->pieces.size()) {
        t->since = steady::now();
        queues[t->priority].push_back(t);
    }
}

void reader_pool::state::drop_queued(const std::shared_ptr<ticket> & t) {
    if (t->next < t->pieces.size()) {
        n_queued -= t->pieces.size() - t->next;
        t->next   = t->pieces.size();
        auto & q  = queues[t->priority];
        q.erase(std::remove(q.begin(), q.end(), t), q.end());
    }
}

void reader_pool::state::fail(const std::shared_ptr<ticket> & t, size_t read, const std::string & why) {
    if (!t->failed && !t->cancelled) {
        t->failed = true;
        t->error  = t->describe(read) + why;
        count.errors++;
    }
    drop_queued(t);
}

// Give up pieces that take too long. Their readers keep their buffers, and others take their places.
void reader_pool::state::leave_stuck_behind(const std::shared_ptr<state> & self) {
    const time_point now = steady::now();
    for (size_t i = 0; i < readers.size(); i++) {
        const std::shared_ptr<reader> r = readers[i];
        if (!r->at || r->copying || now - r->begin < timeout()) {
            continue;
        }
        const std::shared_ptr<ticket> t = std::move(r->at);
        r->at.reset();
        r->wanted = false;
        n_stuck++;
        if (in_place) {
            in_use[t->id]++;
        }
        t->n_reading--;
        progress = now;
        if (!t->failed && !t->cancelled) {
            count.timeouts++;
        }
        fail(t, r->p.read, "a reader is stuck: no answer for " + std::to_string(timeout_ms) + " ms (timeout)");
        r->thread.detach();
        readers.erase(readers.begin() + (std::ptrdiff_t) i--);
        if (!stop && n_stuck <= MAX_STUCK) {
            start_reader(self);
        }
        call_readers(); // nothing is read beside it any more
        ended.notify_all();
    }
}

time_point reader_pool::state::next_timeout() const {
    time_point first = time_point::max();
    for (const auto & r : readers) {
        if (r->at && !r->copying) {
            first = std::min(first, r->begin + timeout());
        }
    }
    return first;
}

void reader_pool::state::wait_for(const std::shared_ptr<state> & self, std::unique_lock<std::mutex> & lock, const std::shared_ptr<ticket> & t) {
    const time_point begin = steady::now();
    while (!t->finished()) {
        if (timeout_ms == 0) {
            ended.wait(lock);
            continue;
        }
        leave_stuck_behind(self);
        if (t->finished()) {
            break;
        }
        time_point until = next_timeout();
        if (t->next < t->pieces.size()) {
            // served by nobody: all readers are stuck, and cannot be replaced
            const time_point stalled = std::max(progress, t->since) + timeout();
            if (steady::now() >= stalled && until == time_point::max()) {
                count.timeouts += !t->failed;
                fail(t, t->pieces[t->next].read, "no reader was free for " + std::to_string(timeout_ms) + " ms (timeout)");
                continue;
            }
            until = std::min(until, std::max(stalled, steady::now() + std::chrono::milliseconds(1)));
        }
        if (until == time_point::max()) {
            ended.wait(lock); // for a copy
        } else {
            ended.wait_until(lock, until);
        }
    }
    tickets.erase(t->id);
    count.wait_ns += nanoseconds_since(begin);
}
