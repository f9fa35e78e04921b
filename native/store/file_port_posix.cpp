#include "store/file_port.h"

#include <cerrno>
#include <cstring>
#include <initializer_list>

#if defined(__unix__) || defined(__APPLE__)

#    include <fcntl.h>
#    include <pthread.h>
#    include <signal.h>
#    include <sys/stat.h>
#    include <sys/uio.h>
#    include <unistd.h>

#    if defined(__linux__)
#        include <sys/syscall.h>
#        include <sys/vfs.h>
#    endif

#    if defined(__linux__) && defined(O_DIRECT) && defined(SYS_statx)
#        define HOTMOE_DIRECT_READS 1
#    endif

static file_identity identity_of(const struct stat & st) {
    file_identity id;
    id.is_regular = S_ISREG(st.st_mode);
    id.size       = (uint64_t) st.st_size;
    id.device     = (uint64_t) st.st_dev;
    id.inode      = (uint64_t) st.st_ino;
#    if defined(__APPLE__)
    const struct timespec & t = st.st_mtimespec;
#    else
    const struct timespec & t = st.st_mtim;
#    endif
    id.modified_ns = (int64_t) t.tv_sec * 1000000000 + t.tv_nsec;
    return id;
}

#    if defined(HOTMOE_DIRECT_READS)

// statx with the two fields that Linux 6.1 brought; its struct is written out, since the headers of a system can be older than
// its kernel.
static bool direct_alignment(int file, file_alignment & alignment) {
    constexpr uint32_t DIOALIGN         = 0x2000;
    constexpr size_t   DIO_MEM_ALIGN    = 152; // where in struct statx
    constexpr size_t   DIO_OFFSET_ALIGN = 156;

    alignas(8) unsigned char st[256] = {};
    uint32_t                 mask    = 0;
    if (syscall(SYS_statx, file, "", AT_EMPTY_PATH, DIOALIGN, st) != 0) {
        return false;
    }
    std::memcpy(&mask, st, sizeof(mask));
    std::memcpy(&alignment.memory, st + DIO_MEM_ALIGN, sizeof(alignment.memory));
    std::memcpy(&alignment.offset, st + DIO_OFFSET_ALIGN, sizeof(alignment.offset));
    return (mask & DIOALIGN) != 0;
}

// Some file systems take the flag and read through the page cache all the same: those that live in it, and since Linux 6.1
// those that say with an alignment of 0 that they would.
static bool reads_directly(int file) {
    constexpr long TMPFS = 0x01021994;
    constexpr long RAMFS = (long) 0x858458f6;

    struct statfs fs;
    if (fstatfs(file, &fs) == 0 && ((long) fs.f_type == TMPFS || (long) fs.f_type == RAMFS)) {
        return false;
    }
    file_alignment alignment;
    return !direct_alignment(file, alignment) || alignment.offset > 0;
}

#    endif

class posix_file_port final : public file_port {
  public:
    int open(const char * path, bool direct) override {
        int flags = O_RDONLY | O_CLOEXEC;
#    if defined(HOTMOE_DIRECT_READS)
        flags |= direct ? O_DIRECT : 0;
#    else
        if (direct) {
            return -ENOTSUP;
        }
#    endif
        int file = -1;
        do {
            file = ::open(path, flags);
        } while (file < 0 && errno == EINTR);
        if (file < 0) {
            return -errno;
        }
#    if defined(HOTMOE_DIRECT_READS)
        if (direct && !reads_directly(file)) {
            ::close(file);
            return -EOPNOTSUPP;
        }
#    endif
#    if defined(POSIX_FADV_RANDOM)
        if (!direct) {
            posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
        }
#    endif
        return file;
    }

    void close(int file) override { ::close(file); }

    int identify(int file, file_identity & identity) override {
        struct stat st;
        if (fstat(file, &st) != 0) {
            return -errno;
        }
        identity = identity_of(st);
        return 0;
    }

    int identify_path(const char * path, file_identity & identity) override {
        struct stat st;
        if (stat(path, &st) != 0) {
            return -errno;
        }
        identity = identity_of(st);
        return 0;
    }

    file_alignment alignment(int file) override {
        file_alignment alignment;
#    if defined(HOTMOE_DIRECT_READS)
        if (direct_alignment(file, alignment)) {
            return alignment;
        }
#    else
        (void) file;
#    endif
        return {};
    }

    int64_t read(int file, const file_part * parts, int32_t n_parts, uint64_t offset) override {
        if (n_parts == 1) {
            const ssize_t n = pread(file, parts[0].data, parts[0].size, (off_t) offset);
            return n >= 0 ? n : -errno;
        }
        struct iovec io[MAX_PARTS];
        for (int32_t i = 0; i < n_parts; i++) {
            io[i].iov_base = parts[i].data;
            io[i].iov_len  = parts[i].size;
        }
        const ssize_t n = preadv(file, io, n_parts, (off_t) offset);
        return n >= 0 ? n : -errno;
    }

    void forget(int file, uint64_t offset, uint64_t size) override {
#    if defined(POSIX_FADV_DONTNEED)
        posix_fadvise(file, (off_t) offset, (off_t) size, POSIX_FADV_DONTNEED);
#    else
        (void) file;
        (void) offset;
        (void) size;
#    endif
    }

    // Signals are for the program's own threads: Python's handler runs late if a reader takes its signal.
    void thread_begins() override {
        sigset_t all;
        sigfillset(&all);
        for (const int fault : { SIGSEGV, SIGBUS, SIGFPE, SIGILL }) { // these are the thread's own
            sigdelset(&all, fault);
        }
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
    }
};

#else

class posix_file_port final : public file_port {
  public:
    int            open(const char *, bool) override { return -ENOSYS; }
    void           close(int) override {}
    int            identify(int, file_identity &) override { return -ENOSYS; }
    int            identify_path(const char *, file_identity &) override { return -ENOSYS; }
    file_alignment alignment(int) override { return {}; }
    int64_t        read(int, const file_part *, int32_t, uint64_t) override { return -ENOSYS; }
    void           forget(int, uint64_t, uint64_t) override {}
};

#endif

// never destroyed: a reader that is stuck at the end of the process may still use it
std::shared_ptr<file_port> system_file_port() {
    static const auto * port = new std::shared_ptr<file_port>(std::make_shared<posix_file_port>());
    return *port;
}
