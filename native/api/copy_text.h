#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

// Fill a text field of a C struct, cut off if it is too long.
template <size_t N> void copy_text(char (&to)[N], const std::string & from) {
    std::snprintf(to, N, "%s", from.c_str());
}
