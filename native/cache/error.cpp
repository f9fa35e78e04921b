#include "error.h"

#include <cstdarg>
#include <cstdio>

static thread_local char last_error[1024] = "";

int32_t hotmoe_fail(int32_t status, const char * format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    return status;
}

const char * hotmoe_last_error(void) {
    return last_error;
}

int32_t hotmoe_api_version(void) {
    return 2;
}

const char * hotmoe_llama_cpp_python_version(void) {
    return HOTMOE_PY_VERSION;
}

const char * hotmoe_llama_cpp_commit(void) {
    return HOTMOE_LLAMA_COMMIT;
}
