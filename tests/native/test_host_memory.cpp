// How much host memory a process may take: from files as systems have them, below a folder that stands for "/".
//
// Prints a line per failed check and a closing 'N passed, N failed'.

#include "store/host_memory.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

namespace fs = std::filesystem;

static int n_passed = 0;
static int n_failed = 0;

#define CHECK(condition)                                                \
    do {                                                                \
        if (condition) {                                                \
            n_passed++;                                                 \
        } else {                                                        \
            n_failed++;                                                 \
            std::printf("line %d: FAILED: %s\n", __LINE__, #condition); \
        }                                                               \
    } while (0)

static constexpr uint64_t KIB = 1024;
static constexpr uint64_t MIB = 1024 * KIB;
static constexpr uint64_t GIB = 1024 * MIB;

// A file system of our own; removed at the end.
struct fake_root {
    fs::path path;

    fake_root() {
        char name[] = "/tmp/host_memory_XXXXXX";
        path        = mkdtemp(name);
        put("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nSwapTotal: 0 kB\n");
    }

    ~fake_root() { fs::remove_all(path); }

    void put(const std::string & name, const std::string & text) const {
        fs::create_directories((path / name).parent_path());
        std::ofstream(path / name) << text;
    }

    // version 2
    void group(const std::string & name, const std::string & max, uint64_t current, const std::string & stat = "") const {
        const std::string folder = "sys/fs/cgroup" + name;
        put(folder + "/memory.max", max + "\n");
        put(folder + "/memory.current", std::to_string(current) + "\n");
        put(folder + "/memory.stat", stat);
    }

    // version 1
    void old_group(const std::string & name, uint64_t limit, uint64_t usage, const std::string & stat = "") const {
        const std::string folder = "sys/fs/cgroup/memory" + name;
        put(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
        put(folder + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
        put(folder + "/memory.stat", stat);
    }

    host_memory now() const { return host_memory_now(path.string()); }
};

static bool has(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

static void test_machine() {
    fake_root         root;
    const host_memory m = root.now();
    CHECK(m.available == 8 * GIB);
    CHECK(m.total == 16 * GIB);
    CHECK(m.limit.empty());
}

static void test_version_2() {
    fake_root root;
    root.put("proc/self/cgroup", "0::/user/job\n");
    root.group("/user/job", std::to_string(3 * GIB), GIB);
    host_memory m = root.now();
    CHECK(m.available == 2 * GIB);
    CHECK(m.total == 3 * GIB);
    CHECK(has(m.limit, "/user/job"));

    // clean page cache can be dropped
    root.group("/user/job", std::to_string(3 * GIB), GIB, "anon 1\nfile 999\ninactive_file " + std::to_string(512 * MIB) + "\nactive_file " + std::to_string(256 * MIB) + "\n");
    CHECK(root.now().available == 2 * GIB + 768 * MIB);

    // no limit
    root.group("/user/job", "max", GIB);
    m = root.now();
    CHECK(m.available == 8 * GIB);
    CHECK(m.total == 16 * GIB);
    CHECK(m.limit.empty());

    // of a parent
    root.group("/user", std::to_string(4 * GIB), 3 * GIB);
    m = root.now();
    CHECK(m.available == GIB);
    CHECK(m.total == 4 * GIB);
    CHECK(!has(m.limit, "/user/job") && has(m.limit, "/user"));

    // the tightest of them, each in its own way: the smallest total is one's, what is left another's
    root.group("/user/job", std::to_string(2 * GIB), 512 * MIB);
    m = root.now();
    CHECK(m.total == 2 * GIB);
    CHECK(m.available == GIB);

    // what is used up is used up
    root.group("/user/job", std::to_string(2 * GIB), 3 * GIB);
    CHECK(root.now().available == 0);

    // more than the machine has is no limit
    fake_root large;
    large.put("proc/self/cgroup", "0::/job\n");
    large.group("/job", std::to_string(64 * GIB), GIB);
    m = large.now();
    CHECK(m.available == 8 * GIB);
    CHECK(m.total == 16 * GIB);
    CHECK(m.limit.empty());
}

// In a container the path can be that of the host, while its own group is the root of the mount.
static void test_container() {
    fake_root root;
    root.put("proc/self/cgroup", "0::/kubepods/pod1/abc\n");
    root.group("", std::to_string(GIB), 256 * MIB);
    CHECK(root.now().available == 768 * MIB);
    CHECK(root.now().total == GIB);

    fake_root at_root;
    at_root.put("proc/self/cgroup", "0::/\n");
    at_root.group("", std::to_string(GIB), 256 * MIB);
    CHECK(at_root.now().available == 768 * MIB);

    fake_root old;
    old.put("proc/self/cgroup", "5:memory:/docker/abc\n0::/\n");
    old.old_group("", GIB, 256 * MIB);
    CHECK(old.now().available == 768 * MIB);
}

static void test_version_1() {
    fake_root root;
    root.put("proc/self/cgroup", "12:cpu,cpuacct:/x\n9:memory:/jobs/a\n1:name=systemd:/y\n0::/z\n");
    root.old_group("/jobs/a", 2 * GIB, GIB, "cache 1\ninactive_file 77\ntotal_inactive_file " + std::to_string(128 * MIB) + "\ntotal_active_file " + std::to_string(128 * MIB) + "\n");
    root.old_group("/jobs", 9223372036854771712ull, 3 * GIB); // how it says that there is none
    root.old_group("/x", MIB, 0);                             // of another controller
    host_memory m = root.now();
    CHECK(m.available == GIB + 256 * MIB);
    CHECK(m.total == 2 * GIB);
    CHECK(has(m.limit, "/jobs/a"));

    // a controller among several of one hierarchy
    fake_root joint;
    joint.put("proc/self/cgroup", "3:cpu,memory,pids:/j\n");
    joint.old_group("/j", GIB, 0);
    CHECK(joint.now().available == GIB);

    // a name that only begins like it
    fake_root other;
    other.put("proc/self/cgroup", "3:memory_events:/j\n");
    other.old_group("/j", GIB, 0);
    CHECK(other.now().available == 8 * GIB);
}

static void test_odd_files() {
    fake_root root;
    root.put("proc/self/cgroup", "\n:\n0:\nnonsense\n4:memory\n0::\n");
    CHECK(root.now().available == 8 * GIB);

    root.put("proc/self/cgroup", "0::/gone\n");
    CHECK(root.now().available == 8 * GIB);

    root.group("/gone", "", 0);
    CHECK(root.now().available == 8 * GIB);

    root.group("/gone", "0", 0);
    CHECK(root.now().available == 0);

    root.put("proc/self/cgroup", "0::relative\n");
    root.now(); // ends

    fake_root nothing;
    fs::remove_all(nothing.path / "proc");
    const host_memory m = nothing.now(); // what the system says of itself
    CHECK(m.total > 0);
    CHECK(m.available > 0 && m.available <= m.total);
}

static void test_this_machine() {
    const host_memory m = host_memory_now();
    CHECK(m.total > 16 * MIB);
    CHECK(m.available > 0);
    CHECK(m.available <= m.total);
}

int main() {
    test_machine();
    test_version_2();
    test_container();
    test_version_1();
    test_odd_files();
    test_this_machine();
    std::printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}
