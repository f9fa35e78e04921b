#pragma once

// How much host memory a process may still take.

#include <cstdint>
#include <string>

struct host_memory {
    uint64_t    available = 0; // bytes that can be allocated without pushing others out, page cache of clean files not counted
    uint64_t    total     = 0; // bytes: of the machine, or of the tightest limit that holds for the process
    std::string limit;         // what sets it, for example "memory cgroup /sys/fs/cgroup/memory/x"; "" for the machine
};

// Linux: the smaller of MemAvailable and what the process's memory cgroups (version 1 or 2) leave. Elsewhere: what the system
// says of itself. `root` stands for "/" in tests.
host_memory host_memory_now(const std::string & root = "");

// Give memory that was freed back to the system, where the allocator keeps it: else it is not available.
void host_memory_trim();
