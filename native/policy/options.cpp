#include "options.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

static std::string trimmed(const std::string & s) {
    const size_t begin = s.find_first_not_of(" \t");
    const size_t end   = s.find_last_not_of(" \t");
    return begin == std::string::npos ? "" : s.substr(begin, end - begin + 1);
}

policy_options::policy_options(const char * text) {
    const std::string all = text ? text : "";
    for (size_t at = 0; at < all.size();) {
        const size_t      comma = std::min(all.find(',', at), all.size());
        const std::string item  = trimmed(all.substr(at, comma - at));
        const size_t      equal = item.find('=');
        const std::string key   = trimmed(item.substr(0, equal));
        if (equal == std::string::npos || key.empty()) {
            fail("\"" + item + "\" is not of the form key=value");
        } else if (!values.emplace(key, trimmed(item.substr(equal + 1))).second) {
            fail("\"" + key + "\" is given twice");
        }
        at = comma + 1;
    }
}

void policy_options::fail(const std::string & message) {
    if (first_error.empty()) {
        first_error = message;
    }
}

std::string policy_options::text(const char * key) {
    known        += (known.empty() ? "" : ", ") + std::string(key);
    const auto it = values.find(key);
    if (it == values.end()) {
        return "";
    }
    const std::string value = it->second;
    values.erase(it);
    return value;
}

double policy_options::number(const char * key, double fallback, double lowest, double highest) {
    const std::string value = text(key);
    if (value.empty()) {
        return fallback;
    }
    char *       end    = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (*end != '\0' || !std::isfinite(number) || number < lowest || number > highest) {
        char range[64];
        std::snprintf(range, sizeof(range), "[%g, %g]", lowest, highest);
        fail(std::string(key) + "=" + value + " is not a number in " + range);
        return fallback;
    }
    return number;
}

long policy_options::integer(const char * key, long fallback, long lowest, long highest) {
    const double value = number(key, (double) fallback, (double) lowest, (double) highest);
    if (value != std::floor(value)) {
        fail(std::string(key) + " must be a whole number");
        return fallback;
    }
    return (long) value;
}

std::string policy_options::error() const {
    if (!first_error.empty() || values.empty()) {
        return first_error;
    }
    return "\"" + values.begin()->first + "\" is not an option here; known: " + (known.empty() ? "none" : known);
}
