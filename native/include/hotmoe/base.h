#ifndef HOTMOE_BASE_H
#define HOTMOE_BASE_H

// What every hotmoe header needs: export macro, status codes, the last error, versions.
//
// All functions of the C API return a status (0 is success) or say otherwise. No C++ exception leaves them. On failure
// nothing has changed, and hotmoe_last_error() of the calling thread names the value, the limit and the fix.

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    ifdef HOTMOE_BUILD
#        define HOTMOE_API __declspec(dllexport)
#    else
#        define HOTMOE_API __declspec(dllimport)
#    endif
#else
#    define HOTMOE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum hotmoe_status {
    HOTMOE_OK           = 0,
    HOTMOE_ERR_ARGUMENT = -1, // a value that the caller gave is not legal
    HOTMOE_ERR_PLAN     = -2, // the sizes asked for cannot be met, or there is nothing to pool
    HOTMOE_ERR_MEMORY   = -3, // an allocation failed
    HOTMOE_ERR_POLICY   = -4, // unknown policy
    HOTMOE_ERR_STORE    = -6, // experts cannot be read from their file
    HOTMOE_ERR_STATE    = -5, // not possible in the present state (already attached, context gone)
};

// Message of the last failed call on this thread; "" if there was none. Valid until the next call on this thread.
HOTMOE_API const char * hotmoe_last_error(void);

// Version of the C API: raised by every change that an older caller would not survive.
HOTMOE_API int32_t hotmoe_api_version(void);

// Release of llama-cpp-python whose llama.cpp this library was built from, for example "0.3.36".
HOTMOE_API const char * hotmoe_llama_cpp_python_version(void);

// Commit of llama.cpp, 40 hex digits.
HOTMOE_API const char * hotmoe_llama_cpp_commit(void);

#ifdef __cplusplus
}
#endif

#endif
