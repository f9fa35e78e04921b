#include "advise.h"

#include <algorithm>

page_range round_to_pages(uintptr_t address, size_t size, int32_t advice, size_t page) {
    const uintptr_t mask = ~(uintptr_t) (page - 1);
    const uintptr_t end  = address + size;
    page_range      r;
    if (advice == HOTMOE_TIER_WILLNEED) {
        r.begin = address & mask;
        r.end   = size > 0 ? (end + page - 1) & mask : r.begin;
    } else {
        r.begin = (address + page - 1) & mask;
        r.end   = std::max(r.begin, end & mask);
    }
    return r;
}

#if defined(__linux__)

#    include <fcntl.h>
#    include <sys/mman.h>
#    include <sys/stat.h>
#    include <unistd.h>

#    include <cinttypes>
#    include <cstdio>
#    include <cstdlib>
#    include <cstring>

// The system cuts a WILLNEED that is longer than its read-ahead window or its largest transfer, whichever is longer, and does
// not say so (a range of 64 MiB brought in 8 MiB where read_ahead_kb is 8192). 128 KiB is the usual window.
constexpr size_t WILLNEED_BYTES = 128 * 1024;

bool page_advisor::supported() {
    return true;
}

page_advisor::page_advisor() : page((size_t) sysconf(_SC_PAGESIZE)) {
    read_mappings();
}

page_advisor::~page_advisor() {
    for (const mapping & m : mappings) {
        if (m.file >= 0) {
            close(m.file);
        }
    }
}

// "\012" stands for a line feed in a path
static std::string unescaped(const char * path) {
    std::string out;
    for (; *path && *path != '\n'; path++) {
        if (std::strncmp(path, "\\012", 4) == 0) {
            out  += '\n';
            path += 3;
        } else {
            out += *path;
        }
    }
    return out;
}

void page_advisor::read_mappings() {
    FILE * maps = std::fopen("/proc/self/maps", "re");
    if (!maps) {
        return;
    }
    char * line = nullptr;
    size_t room = 0;
    while (getline(&line, &room, maps) > 0) {
        mapping  m;
        char     access[5] = "";
        unsigned major     = 0;
        unsigned minor     = 0;
        int      at        = 0;
        if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %" SCNx64 " %x:%x %" SCNu64 " %n", &m.range.begin, &m.range.end, access, &m.offset, &major, &minor,
                        &m.inode, &at) < 7) {
            continue;
        }
        m.path             = unescaped(line + at);
        m.is_private       = access[3] != 's';
        const bool written = access[1] == 'w';
        if (m.inode == 0 || m.path.empty() || m.path[0] != '/' || (m.is_private && written)) {
            continue;
        }
        // one mapping can be listed in parts, where their access differs, for example
        mapping * before = mappings.empty() ? nullptr : &mappings.back();
        if (before && before->range.end == m.range.begin && before->path == m.path && before->inode == m.inode && before->is_private == m.is_private &&
            before->offset + before->range.size() == m.offset) {
            before->range.end = m.range.end;
        } else {
            mappings.push_back(std::move(m));
        }
    }
    std::free(line);
    std::fclose(maps);
}

// The file itself, if it is a regular one and still the one that is mapped. The device is not compared: overlay and btrfs file
// systems report another one here than there. A file taken for another would cost that its pages are read again.
static int open_regular(const std::string & path, uint64_t inode) {
    struct stat st;
    const auto  is_it = [&] { return S_ISREG(st.st_mode) && (uint64_t) st.st_ino == inode; };
    if (stat(path.c_str(), &st) != 0 || !is_it()) { // before it is opened: opening a device can have effects
        return -1;
    }
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file >= 0 && (fstat(file, &st) != 0 || !is_it())) {
        close(file);
        return -1;
    }
    return file;
}

page_advisor::mapping * page_advisor::mapping_of(const page_range & range) {
    const auto after = std::upper_bound(mappings.begin(), mappings.end(), range.begin, [](uintptr_t a, const mapping & m) { return a < m.range.begin; });
    if (after == mappings.begin()) {
        return nullptr;
    }
    mapping & m = *(after - 1);
    if (range.end > m.range.end || range.begin >= m.range.end || range.end < range.begin) {
        return nullptr;
    }
    if (m.file == NOT_OPENED) {
        const int file = open_regular(m.path, m.inode);
        m.file         = file >= 0 ? file : (int) NO_FILE;
    }
    return m.file >= 0 ? &m : nullptr;
}

// Whether a private mapping holds nothing in this range but pages of its file. One that is read-only now may have been written
// to before, and then MADV_DONTNEED would lose what was written.
static bool is_all_of_file(const page_range & range, size_t page) {
    constexpr uint64_t PRESENT = 1ull << 63;
    constexpr uint64_t SWAPPED = 1ull << 62;
    constexpr uint64_t OF_FILE = 1ull << 61; // or of shared memory, which a private mapping has not

    const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pagemap < 0) {
        return false;
    }
    bool                  clean = true;
    std::vector<uint64_t> entries(512);
    for (uintptr_t at = range.begin; clean && at < range.end;) {
        const size_t n = std::min(entries.size(), (size_t) (range.end - at) / page);
        clean          = pread(pagemap, entries.data(), n * sizeof(uint64_t), (off_t) (at / page * sizeof(uint64_t))) == (ssize_t) (n * sizeof(uint64_t));
        for (size_t i = 0; clean && i < n; i++) {
            clean = !(entries[i] & SWAPPED) && (!(entries[i] & PRESENT) || (entries[i] & OF_FILE));
        }
        at += n * page;
    }
    close(pagemap);
    return clean;
}

page_advisor::result page_advisor::advise(const void * data, size_t size, int32_t advice, uint64_t * bytes) {
    const page_range r = round_to_pages((uintptr_t) data, size, advice, page);
    *bytes             = 0;
    const mapping * m  = mapping_of(round_to_pages((uintptr_t) data, size, HOTMOE_TIER_WILLNEED, page));
    if (!m || (advice == HOTMOE_TIER_DONTNEED && m->is_private && !is_all_of_file(r, page))) {
        return REFUSED;
    }
    if (r.size() == 0) {
        return ADVISED;
    }
    *bytes  = r.size();
    bool ok = true;
    if (advice == HOTMOE_TIER_WILLNEED) {
        for (uintptr_t at = r.begin; at < r.end; at += WILLNEED_BYTES) {
            ok = madvise((void *) at, std::min(WILLNEED_BYTES, (size_t) (r.end - at)), MADV_WILLNEED) == 0 && ok;
        }
        return ok ? ADVISED : FAILED;
    }
    // Both are needed: MADV_DONTNEED takes the pages out of this process and leaves them in the page cache, POSIX_FADV_DONTNEED
    // takes them out of the page cache unless somebody maps them. Pages stay that are dirty, locked, or mapped elsewhere, too,
    // and those in a large folio that reaches over an end of the range, since the system lets go of whole folios only. Faults
    // read ahead in folios of up to 2 MiB: on Linux 6.18 with ext4, 0 to 13 pages of ranges of 256 and 1024 stayed, but half of
    // those of 34. What WILLNEED has read is in folios of one page, of these none stayed.
    ok = madvise((void *) r.begin, r.size(), MADV_DONTNEED) == 0;
    ok = posix_fadvise(m->file, (off_t) (m->offset + (r.begin - m->range.begin)), (off_t) r.size(), POSIX_FADV_DONTNEED) == 0 && ok;
    return ok ? ADVISED : FAILED;
}

bool page_advisor::resident(const void * data, size_t size, uint64_t * bytes, uint64_t * in_cache) const {
    const page_range           r = round_to_pages((uintptr_t) data, size, HOTMOE_TIER_DONTNEED, page);
    std::vector<unsigned char> pages(r.size() / page);
    if (!pages.empty() && mincore((void *) r.begin, r.size(), pages.data()) != 0) {
        return false;
    }
    *bytes    = r.size();
    *in_cache = page * (uint64_t) std::count_if(pages.begin(), pages.end(), [](unsigned char c) { return c & 1; });
    return true;
}

#else

bool page_advisor::supported() {
    return false;
}

page_advisor::page_advisor() : page(4096) {}

page_advisor::~page_advisor() = default;

void page_advisor::read_mappings() {}

page_advisor::mapping * page_advisor::mapping_of(const page_range &) {
    return nullptr;
}

page_advisor::result page_advisor::advise(const void *, size_t, int32_t, uint64_t * bytes) {
    *bytes = 0;
    return REFUSED;
}

bool page_advisor::resident(const void *, size_t, uint64_t *, uint64_t *) const {
    return false;
}

#endif
