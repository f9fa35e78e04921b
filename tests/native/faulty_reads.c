// A library to preload: reads of model files fail, are short, are slow or hang, as a control file that is mapped says.
//
// HOTMOE_TEST_FAULTS is the path of the control file. It counts only reads at an offset of files whose name ends in .gguf: that
// is how experts are read. Used by tests/stream_faults.py, which has the same fields.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    int64_t reads;      // so far
    int64_t fail_from;  // the first read that fails; 0: none
    int64_t fail_count; // how many do
    int64_t fail_errno;
    int64_t longest;    // bytes that a read gives at most; 0: all
    int64_t delay_us;   // of each read
    int64_t stick_from; // the first read that hangs; 0: none
    int64_t release;    // not 0: what hangs goes on
};

static volatile struct control * control(void) {
    static volatile struct control * mapped;
    if (!mapped) {
        const char * path = getenv("HOTMOE_TEST_FAULTS");
        const int    file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
        void *       at   = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at == MAP_FAILED) {
            fprintf(stderr, "faulty_reads: no control file\n");
            abort();
        }
        mapped = at;
    }
    return mapped;
}

static int is_model(int file) {
    char link[64];
    char path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    const ssize_t n = readlink(link, path, sizeof(path) - 1);
    if (n < 5) {
        return 0;
    }
    path[n]          = 0;
    const char * end = strstr(path, ".gguf");
    return end && (end[5] == 0 || strcmp(end + 5, " (deleted)") == 0);
}

// Before a read: -1 if it is to fail, else the bytes that it may give.
static int64_t faults(int file, int64_t size) {
    if (!is_model(file)) {
        return size;
    }
    volatile struct control * c = control();
    const int64_t             n = __sync_add_and_fetch(&c->reads, 1);
    if (c->delay_us > 0) {
        usleep((useconds_t) c->delay_us);
    }
    while (c->stick_from > 0 && n == c->stick_from && !c->release) {
        usleep(10000);
    }
    if (c->fail_from > 0 && n >= c->fail_from && n < c->fail_from + c->fail_count) {
        errno = (int) c->fail_errno;
        return -1;
    }
    return c->longest > 0 && c->longest < size ? c->longest : size;
}

static ssize_t read_at(const char * name, int file, void * data, size_t size, off_t offset) {
    ssize_t (*real)(int, void *, size_t, off_t);
    *(void **) &real   = dlsym(RTLD_NEXT, name);
    const int64_t most = faults(file, (int64_t) size);
    return most < 0 ? -1 : real(file, data, (size_t) most, offset);
}

static ssize_t read_parts_at(const char * name, int file, const struct iovec * parts, int n, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t);
    *(void **) &real = dlsym(RTLD_NEXT, name);
    int64_t size     = 0;
    for (int i = 0; i < n; i++) {
        size += (int64_t) parts[i].iov_len;
    }
    int64_t most = faults(file, size);
    if (most < 0) {
        return -1;
    }
    struct iovec some[16];
    int          k = 0;
    for (; k < n && k < 16 && most > 0; k++) {
        some[k] = parts[k];
        if ((int64_t) some[k].iov_len > most) {
            some[k].iov_len = (size_t) most;
        }
        most -= (int64_t) some[k].iov_len;
    }
    return real(file, some, k, offset);
}

ssize_t pread(int file, void * data, size_t size, off_t offset) {
    return read_at("pread", file, data, size, offset);
}

ssize_t pread64(int file, void * data, size_t size, off64_t offset) {
    return read_at("pread64", file, data, size, offset);
}

ssize_t preadv(int file, const struct iovec * parts, int n, off_t offset) {
    return read_parts_at("preadv", file, parts, n, offset);
}

ssize_t preadv64(int file, const struct iovec * parts, int n, off64_t offset) {
    return read_parts_at("preadv64", file, parts, n, offset);
}
