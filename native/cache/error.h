#pragma once

#include "hotmoe/base.h"

// Set the last error of this thread (printf format) and return `status`, so that a failing function can end in one line.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
int32_t hotmoe_fail(int32_t status, const char * format, ...);
