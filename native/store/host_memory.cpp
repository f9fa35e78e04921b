#include "store/host_memory.h"

#include "ggml-backend.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#if defined(__GLIBC__)
#    include <malloc.h>
#endif

// The first number of a file; false if there is none ("max").
static bool read_number(const std::string & path, uint64_t & value) {
    std::ifstream file(path);
    return (bool) (file >> value);
}

// The number after a key in a file of lines "key value" or "key: value kB".
static bool read_field(const std::string & path, const std::string & key, uint64_t & value) {
    std::ifstream file(path);
    std::string   line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string        name;
        words >> name;
        if (name == key && words >> value) {
            return true;
        }
    }
    return false;
}

// One cgroup: what is left below its limit. Page cache that it could drop counts as left.
static void apply_limit(const std::string & folder, const char * limit_file, const char * usage_file, const char * cache_field, host_memory & out) {
    uint64_t limit = 0;
    uint64_t usage = 0;
    uint64_t cache = 0;
    if (!read_number(folder + "/" + limit_file, limit) || !read_number(folder + "/" + usage_file, usage) || limit >= (1ull << 62)) {
        return;
    }
    for (const std::string kind : { "inactive_file", "active_file" }) {
        uint64_t part = 0;
        if (read_field(folder + "/memory.stat", cache_field + kind, part)) {
            cache += part;
        }
    }
    usage               = usage > cache ? usage - cache : 0;
    const uint64_t left = limit > usage ? limit - usage : 0;
    if (limit < out.total) {
        out.total = limit;
        out.limit = "memory cgroup " + folder;
    }
    out.available = std::min(out.available, left);
}

host_memory host_memory_now(const std::string & root) {
    host_memory out;
    uint64_t    kib = 0;
    if (read_field(root + "/proc/meminfo", "MemAvailable:", kib)) {
        out.available = kib * 1024;
        read_field(root + "/proc/meminfo", "MemTotal:", kib);
        out.total = kib * 1024;
    } else if (ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        size_t free  = 0;
        size_t total = 0;
        ggml_backend_dev_memory(cpu, &free, &total);
        out.available = free;
        out.total     = total;
    }

    // lines "hierarchy:controllers:path"; version 2 has "0::path". Inside a container the path may not be visible, but the
    // container's own cgroup is then at the root of the mount.
    std::ifstream self(root + "/proc/self/cgroup");
    std::string   line;
    while (std::getline(self, line)) {
        const size_t first  = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::string       path        = line.substr(second + 1);
        const bool        version2    = controllers.empty();
        if (!version2 && ("," + controllers + ",").find(",memory,") == std::string::npos) {
            continue;
        }
        const std::string mount = root + (version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
        for (;;) { // a limit of a parent holds, too
            const std::string folder = path == "/" ? mount : mount + path;
            if (version2) {
                apply_limit(folder, "memory.max", "memory.current", "", out);
            } else {
                apply_limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_", out);
            }
            if (path.empty() || path == "/") {
                break;
            }
            path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
            if (path.empty()) {
                path = "/";
            }
        }
    }
    return out;
}

void host_memory_trim() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}
