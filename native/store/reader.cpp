#include "store/reader.h"

#include "store/reader_state.h"

#include <algorithm>

reader_pool::reader_pool() : s(std::make_shared<state>()) {}

std::unique_ptr<reader_pool> reader_pool::create(int32_t n_threads, store_direct direct, uint64_t timeout_ms, std::shared_ptr<file_port> port,
                                                 std::string & error, const reader_tuning & tuning) {
    constexpr int32_t  MAX_THREADS = 256;
    constexpr uint64_t MAX_PIECE   = 1ull << 30;
    constexpr uint64_t MAX_TIMEOUT = 24ull * 3600 * 1000;
    if (n_threads < 0 || n_threads > MAX_THREADS) {
        error = "io_threads is " + std::to_string(n_threads) + ": give 1 to " + std::to_string(MAX_THREADS) + ", or 0 for " + std::to_string(N_THREADS);
        return nullptr;
    }
    std::unique_ptr<reader_pool> pool(new reader_pool());
    state &                      s = *pool->s;
    s.direct                       = direct;
    s.timeout_ms                   = std::min(timeout_ms, MAX_TIMEOUT);
    s.piece_size                   = tuning.piece_bytes == 0 ? PIECE_BYTES : std::min(std::max(tuning.piece_bytes, PIECE_ALIGNMENT), MAX_PIECE);
    s.in_place                     = tuning.in_place;
    s.n_threads                    = (size_t) (n_threads == 0 ? N_THREADS : n_threads);
    s.port                         = port ? std::move(port) : system_file_port();
    s.progress                     = steady::now();

    std::unique_lock<std::mutex> lock(s.mutex);
    for (size_t i = 0; i < s.n_threads; i++) {
        if (!state::start_reader(pool->s)) {
            error = "cannot start reader thread " + std::to_string(i + 1) + ": the system has no more threads; take fewer io_threads";
            lock.unlock();
            return nullptr;
        }
    }
    return pool;
}

reader_pool::~reader_pool() {
    std::vector<std::shared_ptr<reader>> readers;
    {
        std::unique_lock<std::mutex> lock(s->mutex);
        s->stop = true;
        for (auto & queue : s->queues) {
            while (!queue.empty()) {
                const std::shared_ptr<ticket> t = queue.front();
                t->cancelled                    = true;
                s->drop_queued(t);
            }
        }
        for (auto & t : s->tickets) {
            t.second->cancelled = true;
        }
        s->work.notify_all();
        const auto all_exited = [&] { return std::all_of(s->readers.begin(), s->readers.end(), [](const auto & r) { return r->exited; }); };
        while (!all_exited()) {
            if (s->timeout_ms > 0) {
                s->leave_stuck_behind(s);
            }
            const time_point until = s->timeout_ms > 0 ? s->next_timeout() : time_point::max();
            if (all_exited()) {
                break;
            }
            if (until == time_point::max()) {
                s->ended.wait(lock);
            } else {
                s->ended.wait_until(lock, until);
            }
        }
        readers.swap(s->readers);
    }
    for (const auto & r : readers) {
        r->thread.join();
    }
}

int32_t reader_pool::add_file(const std::string & path, std::string & error) {
    const source_file::mode how = s->direct == store_direct::on ? source_file::DIRECT_OR_FAIL :
        s->direct == store_direct::off                          ? source_file::BUFFERED :
                                                                  source_file::DIRECT_IF_POSSIBLE;

    const std::shared_ptr<source_file> file = source_file::open(path, how, s->port, error);
    if (!file) {
        return -1;
    }
    const std::lock_guard<std::mutex> lock(s->mutex);
    for (size_t i = 0; i < s->files.size(); i++) {
        const file_identity & a = s->files[i]->identity;
        const file_identity & b = file->identity;
        if (s->files[i]->path == file->path && a.device == b.device && a.inode == b.inode && a.size == b.size && a.modified_ns == b.modified_ns) {
            return (int32_t) i;
        }
    }
    s->files.push_back(file);
    return (int32_t) s->files.size() - 1;
}

uint64_t reader_pool::submit(const store_read * reads, size_t n, int priority, const char * const * names, bool wake) {
    auto t      = std::make_shared<ticket>();
    t->priority = std::min(std::max(priority, 0), N_PRIORITIES - 1);
    t->reads.assign(reads, reads + n);
    t->files.resize(n);
    if (names) {
        t->names.resize(n);
        for (size_t i = 0; i < n; i++) {
            t->names[i] = names[i] ? names[i] : "";
        }
    }

    {
        const std::lock_guard<std::mutex> lock(s->mutex);
        t->id = ++s->last_id;
        s->tickets.emplace(t->id, t);
        for (size_t i = 0; i < n && !t->failed; i++) {
            const std::string why = s->prepare(*t, i);
            if (!why.empty()) {
                t->pieces.clear(); // nothing of it is read
                s->fail(t, i, why);
            }
        }
        s->n_queued        += t->pieces.size();
        s->count.queue_peak = std::max<uint64_t>(s->count.queue_peak, s->n_queued);
        s->enqueue(t);
    }
    if (wake) {
        this->wake();
    }
    return t->id;
}

void reader_pool::wake() {
    size_t n = 0;
    {
        const std::lock_guard<std::mutex> lock(s->mutex);
        n = s->n_wanted();
    }
    // not call_readers(): who is woken while the mutex is held is put to sleep again by it
    for (; n > 0; n--) {
        s->work.notify_one();
    }
}

bool reader_pool::done(uint64_t ticket) const {
    const std::lock_guard<std::mutex> lock(s->mutex);
    const auto                        found = s->tickets.find(ticket);
    return found == s->tickets.end() || found->second->finished();
}

bool reader_pool::wait(uint64_t ticket, std::string & error) {
    std::unique_lock<std::mutex> lock(s->mutex);
    const auto                   found = s->tickets.find(ticket);
    if (found == s->tickets.end()) {
        error = "ticket " + std::to_string(ticket) + " was never given out, or its wait has ended";
        return false;
    }
    const auto t = found->second;
    if (t->next < t->pieces.size()) {
        if (t->priority > 0) {
            auto & q = s->queues[t->priority];
            q.erase(std::remove(q.begin(), q.end(), t), q.end());
            t->priority = 0;
            s->enqueue(t);
        }
        s->call_readers();
    }
    s->wait_for(s, lock, t);
    if (t->failed) {
        error = t->error;
    } else if (t->cancelled) {
        error = "ticket " + std::to_string(ticket) + " was cancelled";
    }
    return !t->failed && !t->cancelled;
}

void reader_pool::cancel(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(s->mutex);
    const auto                   found = s->tickets.find(ticket);
    if (found != s->tickets.end()) {
        const auto t = found->second;
        t->cancelled = true;
        s->drop_queued(t);
        s->wait_for(s, lock, t);
    }
}

bool reader_pool::in_use(uint64_t ticket) const {
    const std::lock_guard<std::mutex> lock(s->mutex);
    return s->in_use.count(ticket) > 0;
}

store_counters reader_pool::counters() const {
    const std::lock_guard<std::mutex> lock(s->mutex);
    store_counters                    c = s->count;
    c.disk_bytes                        = c.direct_bytes + c.buffered_bytes;
    return c;
}

std::string reader_pool::warning() const {
    const std::lock_guard<std::mutex> lock(s->mutex);
    if (s->direct == store_direct::off) {
        return "";
    }
    for (const auto & file : s->files) {
        const std::string why = file->why_buffered();
        if (!why.empty()) {
            return "direct reads of " + file->path + " are refused: " + why + "; it is read through the page cache";
        }
    }
    return "";
}

// A piece that is not read in place, with the rest of its first and its last block.
uint64_t reader_pool::buffer_bytes(uint64_t largest_read) const {
    const std::lock_guard<std::mutex> lock(s->mutex);
    uint64_t                          block = 1;
    for (const auto & file : s->files) {
        block = std::max<uint64_t>(block, file->block());
    }
    return s->readers.size() * (std::min(largest_read, s->piece_size + PIECE_ALIGNMENT) + 2 * block);
}

int32_t reader_pool::n_threads() const {
    const std::lock_guard<std::mutex> lock(s->mutex);
    return (int32_t) s->readers.size();
}
