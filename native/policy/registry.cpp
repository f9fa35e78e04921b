// The table of built-in policies.

#include "policies.h"

#include "cache/error.h"

#include <cstring>
#include <exception>
#include <string>

struct policy_row {
    const char * name;
    const char * description;
    void (*create)(int32_t n_expert, int32_t n_slots, hotmoe_policy & out);
};

static const policy_row rows[] = {
    { "lru", "least recently used", policy_lru_create },
    { "slru", "segmented LRU: 20 % on probation, 80 % protected", policy_slru_create },
    { "lfu", "least frequently used, counts halve every 64 events", policy_lfu_create },
    { "fifo", "first in, first out", policy_fifo_create },
};

static const int32_t n_rows = sizeof(rows) / sizeof(rows[0]);

int32_t hotmoe_policy_count(void) {
    return n_rows;
}

const char * hotmoe_policy_name(int32_t i) {
    return i >= 0 && i < n_rows ? rows[i].name : nullptr;
}

const char * hotmoe_policy_description(int32_t i) {
    return i >= 0 && i < n_rows ? rows[i].description : nullptr;
}

int32_t hotmoe_policy_create(const char * name, int32_t n_expert, int32_t n_slots, hotmoe_policy * out) {
    if (!name || !out || n_expert < 1 || n_slots < 1) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "policy: name and out must be set, n_expert (%d) and n_slots (%d) at least 1", n_expert, n_slots);
    }
    try {
        std::string known;
        for (const policy_row & row : rows) {
            if (std::strcmp(row.name, name) == 0) {
                row.create(n_expert, n_slots, *out);
                return HOTMOE_OK;
            }
            known += known.empty() ? row.name : std::string(", ") + row.name;
        }
        return hotmoe_fail(HOTMOE_ERR_POLICY, "unknown policy \"%s\"; known policies: %s", name, known.c_str());
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "policy \"%s\": %s", name, e.what());
    }
}
