#pragma once

// Sizes: from what the user wrote to slots per layer.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct size_request {
    enum kind_t { slots,
                  bytes,
                  automatic };

    kind_t      kind  = slots;
    uint64_t    value = 0; // slots per layer, or bytes per device; unused for automatic
    std::string text;      // as the user wrote it
};

// "32", "6GiB", "auto", and lists such as "48/64" (one value per device). K, M, G, T count in powers of 1024, with or
// without "B" or "iB". 0 is legal in a list only. On false, `error` says what is wrong.
bool parse_size_list(const char * text, std::vector<size_request> & out, std::string & error);

// One size, "32", "32s" (slots) or bytes or "auto", for host memory.
bool parse_host_size(const char * text, size_request & out, std::string & error);

// What one bank costs on its device.
struct bank_cost {
    int32_t  n_expert      = 0;
    int32_t  n_expert_used = 0; // smallest legal number of slots
    uint64_t slot_bytes    = 0; // one expert, all tensors
    uint64_t fixed_bytes   = 0; // table, tails, alignment
};

struct device_memory {
    std::string name;
    uint64_t    free     = 0;
    uint64_t    total    = 0;
    uint64_t    headroom = 0; // "auto" leaves this much free
    std::string limit;        // what limits it, if that is not its own size
};

// What "auto" leaves free for what is allocated after the pool: larger graphs, other contexts, the driver.
uint64_t default_headroom(uint64_t total_bytes);

// Decide the slots of every bank of one device. n_slots gets one value per bank. On false, `error` names value, limit, fix.
bool plan_slots(const size_request & request, const device_memory & device, const std::vector<bank_cost> & banks,
                std::vector<int32_t> & n_slots, std::string & error);
