#include "plan.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>

// Rounded up: a size that is named as a minimum must suffice.
static std::string bytes_text(uint64_t bytes) {
    char text[48];
    if (bytes < (10u << 20)) {
        std::snprintf(text, sizeof(text), "%llu KiB", (unsigned long long) (bytes + 1023) / 1024);
    } else {
        std::snprintf(text, sizeof(text), "%llu MiB", (unsigned long long) ((bytes + (1u << 20) - 1) >> 20));
    }
    return text;
}

// number = digits [. digits] [unit]; `unit` is what follows, without spaces and in capitals
static bool split_number(const std::string & text, double & number, std::string & unit) {
    size_t n = 0;
    while (n < text.size() && (std::isdigit((unsigned char) text[n]) || (text[n] == '.' && n > 0))) {
        n++;
    }
    if (n == 0) {
        return false;
    }
    char * end = nullptr;
    number     = std::strtod(text.substr(0, n).c_str(), &end);
    unit.clear();
    for (const char c : std::string(end) + text.substr(n)) {
        if (c != ' ') {
            unit += (char) std::toupper((unsigned char) c);
        }
    }
    return true;
}

static bool parse_size(const std::string & text, size_request & out) {
    out.text = text;
    if (text == "auto") {
        out.kind = size_request::automatic;
        return true;
    }
    double      number = 0;
    std::string unit;
    if (!split_number(text, number, unit)) {
        return false;
    }
    if (unit.empty()) {
        out.kind  = size_request::slots;
        out.value = (uint64_t) std::min(number, 1e6);
        return text.find('.') == std::string::npos;
    }
    static const std::string prefixes = "KMGT";
    const size_t             power    = prefixes.find(unit[0]);
    if (power != std::string::npos) {
        unit    = unit.substr(1);
        number *= std::pow(1024.0, (double) power + 1);
        if (unit == "IB") {
            unit = "B";
        }
    }
    out.kind  = size_request::bytes;
    out.value = (uint64_t) std::min(number, 9e18);
    return unit == "B" || (unit.empty() && power != std::string::npos);
}

static std::string trim(const std::string & text) {
    const size_t first = text.find_first_not_of(' ');
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

bool parse_size_list(const char * text, std::vector<size_request> & out, std::string & error) {
    out.clear();
    const std::string whole = text ? text : "";
    std::string       rest  = whole;
    bool              legal = true;
    bool              any   = false; // a size that is not 0
    for (;;) {
        const size_t slash = rest.find('/');
        size_request request;
        legal = legal && parse_size(trim(rest.substr(0, slash)), request);
        any   = any || request.kind == size_request::automatic || request.value > 0;
        out.push_back(request);
        if (slash == std::string::npos) {
            break;
        }
        rest = rest.substr(slash + 1);
    }
    if (!legal) {
        error = "size \"" + whole + "\" is neither a number of slots (\"32\"), nor bytes (\"6GiB\", \"512M\"), nor \"auto\", nor a list of these for several devices (\"48/64\")";
        return false;
    }
    if (!any) {
        error = "size \"" + whole + "\" means no pool at all: leave the expert cache off instead, or give at least one slot per expert used";
        return false;
    }
    return true;
}

bool parse_host_size(const char * text, size_request & out, std::string & error) {
    std::string size = trim(text ? text : "");
    if (!size.empty() && (size.back() == 's' || size.back() == 'S')) {
        size.pop_back();
    }
    if (!parse_size(size, out) || (out.kind != size_request::automatic && out.value == 0)) {
        error = "host_slots \"" + std::string(text ? text : "") + "\" is neither a number of slots per layer (\"32\", \"32s\"), nor bytes of all layers (\"24GiB\"), nor \"auto\"";
        return false;
    }
    out.text = text;
    return true;
}

uint64_t default_headroom(uint64_t total_bytes) {
    return std::max<uint64_t>(total_bytes / 20, 16ull << 20);
}

bool plan_slots(const size_request & request, const device_memory & device, const std::vector<bank_cost> & banks,
                std::vector<int32_t> & n_slots, std::string & error) {
    uint64_t slot_bytes  = 0;
    uint64_t fixed_bytes = 0;
    int32_t  min_slots   = 1;
    int32_t  max_slots   = 1;
    for (const bank_cost & bank : banks) {
        slot_bytes  += bank.slot_bytes;
        fixed_bytes += bank.fixed_bytes;
        min_slots    = std::max(min_slots, bank.n_expert_used);
        max_slots    = std::max(max_slots, bank.n_expert);
    }

    uint64_t slots = request.value;
    if (request.kind != size_request::slots) {
        uint64_t budget = request.value;
        if (request.kind == size_request::automatic) {
            budget = device.free > device.headroom ? device.free - device.headroom : 0;
        }
        slots = budget > fixed_bytes ? (budget - fixed_bytes) / std::max<uint64_t>(slot_bytes, 1) : 0;
    }
    slots = std::min<uint64_t>(slots, max_slots);

    if (slots < (uint64_t) min_slots) {
        error = device.name + ": size \"" + request.text + "\" gives " + std::to_string(slots) + " slots per layer, but each token uses " +
            std::to_string(min_slots) + " experts: the minimum is " + std::to_string(min_slots) + " slots, or " + bytes_text(slot_bytes * min_slots + fixed_bytes);
        if (request.kind == size_request::automatic) {
            error += " (free: " + bytes_text(device.free) + ", kept free: " + bytes_text(device.headroom) +
                "); free device memory, shorten the context, or put fewer layers on the device";
        }
        return false;
    }

    n_slots.clear();
    for (const bank_cost & bank : banks) {
        n_slots.push_back((int32_t) std::min<uint64_t>(slots, bank.n_expert));
    }
    return true;
}
