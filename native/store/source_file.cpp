#include "store/source_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>

static uint64_t round_down(uint64_t x, uint64_t block) {
    return x - x % block;
}

static uint64_t round_up(uint64_t x, uint64_t block) {
    return round_down(x + block - 1, block);
}

static std::string errno_text(int64_t negative) {
    return std::generic_category().message((int) -negative) + " (errno " + std::to_string(-negative) + ")";
}

// EINVAL, and what a port says that has no direct reads
static bool is_refusal(int64_t negative) {
    return negative == -EINVAL || negative == -ENOTSUP || negative == -EOPNOTSUPP;
}

bounce_buffer::~bounce_buffer() {
    ::operator delete(data, std::align_val_t(alignment));
}

uint8_t * bounce_buffer::reserve(size_t size, size_t align) {
    if (size > capacity || align > alignment) {
        ::operator delete(data, std::align_val_t(alignment));
        alignment = std::max(alignment, align);
        data      = (uint8_t *) ::operator new(size, std::align_val_t(alignment), std::nothrow);
        capacity  = data ? size : 0;
    }
    return data;
}

source_file::source_file(std::string path, const file_identity & identity, mode how, std::shared_ptr<file_port> port) : path(std::move(path)), identity(identity), how(how), port(std::move(port)) {}

source_file::~source_file() {
    for (const int file : { direct, buffered }) {
        if (file >= 0) {
            port->close(file);
        }
    }
}

std::shared_ptr<source_file> source_file::open(const std::string & path, mode how, std::shared_ptr<file_port> port, std::string & error) {
    // absolute, since it is looked at again later, when the working directory may be another
    std::error_code   ec;
    const auto        found    = std::filesystem::absolute(path, ec);
    const std::string absolute = ec ? path : found.string();

    file_identity named;
    file_identity identity;
    int           rc = port->identify_path(absolute.c_str(), named);
    if (rc < 0) {
        error = "cannot open " + absolute + ": " + errno_text(rc);
        return nullptr;
    }
    if (!named.is_regular) { // before it is opened: opening a pipe or a device can block
        error = absolute + " is not a regular file: experts can only be read from one; save the model to a disk first";
        return nullptr;
    }
    const int buffered = port->open(absolute.c_str(), false);
    if (buffered < 0) {
        error = "cannot open " + absolute + ": " + errno_text(buffered);
        return nullptr;
    }
    rc = port->identify(buffered, identity);
    std::shared_ptr<source_file> file(new source_file(absolute, identity, how, port));
    file->buffered = buffered;
    if (rc < 0 || !identity.is_regular) {
        error = "cannot open " + absolute + ": " + (rc < 0 ? errno_text(rc) : "it was replaced by something that is not a regular file");
        return nullptr;
    }
    std::string refusal;
    if (how != BUFFERED && !file->probe(refusal) && how == DIRECT_OR_FAIL) {
        error = "direct reads of " + absolute + " are refused: " + refusal + "; use direct=auto or off, or another file system";
        return nullptr;
    }
    return file;
}

// Find the smallest alignment that a read works with. The system's word is tried, too: a file system can lie over another one.
bool source_file::probe(std::string & refusal) {
    direct = port->open(path.c_str(), true);
    if (direct < 0) {
        refused_with = -direct;
        refusal      = errno_text(direct);
        return false;
    }
    file_identity opened;
    if (port->identify(direct, opened) < 0 || opened.device != identity.device || opened.inode != identity.inode) {
        refused_with = ESTALE;
        refusal      = "the file was replaced while it was opened";
        return false;
    }
    const file_alignment told    = port->alignment(direct);
    const file_alignment tried[] = {
        { std::max(told.memory, 1u), std::max(told.offset, 1u) },
        { 512, 512 },
        { 4096, 4096 },
        { 65536, 65536 },
    };
    int64_t n = -EINVAL;
    for (const file_alignment & a : tried) {
        if ((told.offset == 0 && &a == tried) || a.offset < told.offset || a.memory < told.memory || (a.memory & (a.memory - 1)) != 0) {
            continue;
        }
        bounce_buffer   bounce;
        const size_t    alignment = std::max((size_t) 2 * a.memory, sizeof(void *));
        uint8_t * const data      = bounce.reserve((size_t) a.memory + a.offset, std::max<size_t>(alignment, bounce_buffer::ALIGNMENT));
        if (!data) {
            n = -ENOMEM;
            break;
        }
        // not better aligned than it says: neither the address nor, if the file is that long, the offset
        const file_part part   = { data + a.memory, a.offset };
        const uint64_t  offset = identity.size > a.offset ? a.offset : 0;
        for (int32_t tries = 0; tries < 3; tries++) {
            n = port->read(direct, &part, 1, offset);
            if (n != -EINTR && n != -EIO && n != -EAGAIN) {
                break;
            }
        }
        if (!is_refusal(n)) {
            align        = a;
            direct_works = true; // an error that is none of alignment is for those who need the bytes
            return true;
        }
    }
    refused_with = (int) -n;
    refusal      = errno_text(n);
    return false;
}

std::string source_file::why_buffered() const {
    const int code = refused_with;
    return code == 0 ? "" : errno_text(-code);
}

// Whether it is what it was when it was opened. A path that leads nowhere is no fault: the bytes are still ours.
bool source_file::same_file(std::string & error) const {
    file_identity now;
    const int     rc = port->identify(buffered, now);
    if (rc < 0) {
        error = errno_text(rc);
    } else if (now.size != identity.size) {
        error = std::string("the file was ") + (now.size < identity.size ? "truncated" : "written to") + " while it was in use: it had " +
            std::to_string(identity.size) + " bytes, and has " + std::to_string(now.size) + "; restore it and load the model again";
    } else if (now.modified_ns != identity.modified_ns) {
        error = "the file was written to while it was in use; restore it and load the model again";
    } else if (port->identify_path(path.c_str(), now) == 0 && (now.device != identity.device || now.inode != identity.inode)) {
        error = "the file was replaced by another one while it was in use; load the model again";
    } else {
        return true;
    }
    return false;
}

std::string source_file::ended_at(uint64_t offset) const {
    std::string error;
    if (same_file(error)) {
        error = "the file ended early, at " + std::to_string(offset) + " of " + std::to_string(identity.size) + " bytes";
    }
    return error;
}

// Consecutive bytes of the file and their places, of which a read fills the rest that begins at some offset.
struct source_file::span {
    uint64_t  begin = 0;
    file_part parts[file_port::MAX_PARTS];
    int32_t   n_parts = 0;

    void add(void * data, uint64_t size) {
        if (size > 0) {
            parts[n_parts++] = { data, size };
        }
    }

    // the parts of [from, to)
    int32_t rest(uint64_t from, uint64_t to, file_part * out) const {
        int32_t  n  = 0;
        uint64_t at = begin;
        for (int32_t i = 0; i < n_parts; i++) {
            const uint64_t first = std::max(from, at);
            const uint64_t last  = std::min(to, at + parts[i].size);
            if (first < last) {
                out[n++] = { (uint8_t *) parts[i].data + (first - at), last - first };
            }
            at += parts[i].size;
        }
        return n;
    }
};

read_outcome source_file::read(uint64_t offset, uint64_t size, void * dst, bool in_place, bounce_buffer & bounce, const std::atomic<bool> & wanted) {
    read_outcome   out;
    bool           use_direct = direct_works;
    const uint64_t block      = use_direct ? align.offset : 1;
    const uint64_t end        = offset + size;
    const uint64_t first      = round_up(offset, block); // of the whole blocks in it
    const uint64_t last       = round_down(end, block);
    uint8_t *      place      = (uint8_t *) dst + (first - offset);

    span s;
    s.begin                      = round_down(offset, block);
    const uint64_t s_end         = round_up(end, block);
    const bool     middle        = in_place && first < last && (!use_direct || (uintptr_t) place % align.memory == 0);
    const uint64_t buffered_size = middle ? 2 * std::max<uint64_t>(block, align.memory) : s_end - s.begin;
    uint8_t *      buffer        = bounce.reserve(buffered_size, std::max<size_t>(align.memory, bounce_buffer::ALIGNMENT));
    if (!buffer) {
        out.error = "no memory for a buffer of " + std::to_string(buffered_size) + " bytes";
        return out;
    }
    if (middle) {
        uint8_t * tail = buffer + buffered_size / 2;
        s.add(buffer, first - s.begin);
        s.add(place, last - first);
        s.add(tail, s_end - last);
        if (offset < first) {
            out.copies[out.n_copies++] = { dst, buffer + (offset - s.begin), first - offset };
        }
        if (last < end) {
            out.copies[out.n_copies++] = { place + (last - first), tail, end - last };
        }
        out.in_place_bytes = last - first;
    } else {
        s.add(buffer, s_end - s.begin);
        out.copies[out.n_copies++] = { dst, buffer + (offset - s.begin), size };
    }

    bool repeated = false;
    for (uint64_t at = s.begin; at < end;) {
        // a direct read that ended inside of a block cannot be continued there
        const bool     directly = use_direct && at % block == 0;
        const uint64_t to       = directly ? s_end : use_direct ? std::min(end, round_up(at, block)) :
                                                                  end;
        file_part      parts[file_port::MAX_PARTS];
        const int32_t  n_parts = s.rest(at, to, parts);
        const int64_t  n       = port->read(directly ? direct : buffered, parts, n_parts, at);
        out.reads++;
        if (n > 0) {
            (directly ? out.direct_bytes : out.buffered_bytes) += (uint64_t) n;
            if (!directly) {
                port->forget(buffered, at, (uint64_t) n);
            }
            at += (uint64_t) n;
        } else if (n == 0) {
            out.error = ended_at(at);
            return out;
        } else if (directly && is_refusal(n) && how != DIRECT_OR_FAIL) {
            refused_with = (int) -n;
            direct_works = false; // for all that follows
            use_direct   = false;
        } else if ((n == -EIO || n == -EAGAIN) && !repeated) {
            repeated = true;
            out.retries++;
        } else if (n != -EINTR) {
            out.error = (directly && is_refusal(n) ? "direct reads are refused: " : "") + errno_text(n) + (repeated ? ", after a retry" : "");
            return out;
        }
        if (!wanted) {
            out.error = "not wanted any more";
            return out;
        }
    }
    same_file(out.error);
    return out;
}
