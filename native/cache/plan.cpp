#include "plan.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>

static std::string mib(uint64_t bytes) {
    char text[48];
    std::snprintf(text, sizeof(text), "%.1f MiB", bytes / 1048576.0);
    return text;
}

static bool parse_size(const std::string & text, size_request & out, std::string & error) {
    out.text = text;
    if (text == "auto") {
        out.kind = size_request::automatic;
        return true;
    }

    const char * p   = text.c_str();
    char *       end = nullptr;
    const double number = std::isdigit((unsigned char) *p) ? std::strtod(p, &end) : -1.0;
    std::string unit;
    for (const char * u = number < 0 ? "?" : end; *u; u++) {
        if (*u != ' ') {
            unit += (char) std::toupper((unsigned char) *u);
        }
    }

    static const char prefixes[] = "KMGT";
    double factor = 1.0;
    bool   legal  = std::isfinite(number) && number >= 0;
    out.kind = unit.empty() ? size_request::slots : size_request::bytes;
    if (!unit.empty() && legal) {
        const std::string letters = prefixes;
        const size_t      power   = letters.find(unit[0]);
        const std::string rest    = power == std::string::npos ? unit : unit.substr(1);
        if (power != std::string::npos) {
            factor = std::pow(1024.0, (double) power + 1);
            legal  = rest.empty() || rest == "B" || rest == "IB";
        } else {
            legal = rest == "B";
        }
    }
    if (out.kind == size_request::slots && legal) {
        legal = number == std::floor(number) && number < 1e6;
    }
    legal = legal && number * factor < 9e18;
    if (!legal) {
        error = "size \"" + text + "\" is neither a number of slots (\"32\"), nor bytes (\"6GiB\", \"512M\"), nor \"auto\"";
        return false;
    }
    out.value = (uint64_t) (number * factor);
    if (out.value == 0) {
        error = "size \"" + text + "\" means no pool at all: leave the expert cache off instead, or give at least one slot per expert used";
        return false;
    }
    return true;
}

bool parse_size_list(const char * text, std::vector<size_request> & out, std::string & error) {
    out.clear();
    std::string rest = text ? text : "";
    for (;;) {
        const size_t slash = rest.find('/');
        size_request request;
        if (!parse_size(rest.substr(0, slash), request, error)) {
            return false;
        }
        out.push_back(request);
        if (slash == std::string::npos) {
            return true;
        }
        rest = rest.substr(slash + 1);
    }
}

bool plan_slots(const size_request & request, device_memory & device, const std::vector<bank_cost> & banks,
                std::vector<int32_t> & n_slots, std::string & error) {
    uint64_t slot_bytes  = 0;
    uint64_t fixed_bytes = 0;
    uint64_t min_bytes   = 0;
    int32_t  min_slots   = 1;
    int32_t  max_slots   = 1;
    for (const bank_cost & bank : banks) {
        slot_bytes  += bank.slot_bytes;
        fixed_bytes += bank.fixed_bytes;
        min_bytes   += bank.slot_bytes * bank.n_expert_used + bank.fixed_bytes;
        min_slots    = std::max(min_slots, bank.n_expert_used);
        max_slots    = std::max(max_slots, bank.n_expert);
    }

    uint64_t slots = request.value;
    if (request.kind != size_request::slots) {
        uint64_t budget = request.value;
        if (request.kind == size_request::automatic) {
            // kept free for what is allocated after the pool: larger graphs, other contexts, the driver
            device.headroom = std::max<uint64_t>(device.total / 20, 16ull << 20);
            budget          = device.free > device.headroom ? device.free - device.headroom : 0;
        }
        slots = budget > fixed_bytes ? (budget - fixed_bytes) / std::max<uint64_t>(slot_bytes, 1) : 0;
    }
    slots = std::min<uint64_t>(slots, max_slots);

    if (slots < (uint64_t) min_slots) {
        error = device.name + ": size \"" + request.text + "\" gives " + std::to_string(slots) + " slots per layer, but each token uses " +
                std::to_string(min_slots) + " experts: the minimum is " + std::to_string(min_slots) + " slots, or " + mib(min_bytes);
        if (request.kind == size_request::automatic) {
            error += " (free: " + mib(device.free) + ", kept free: " + mib(device.headroom) +
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
