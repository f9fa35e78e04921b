#pragma once

// The registry of one kind of object (policies, admissions, tier managers): the table of the built-in ones, those that were
// registered, and shared libraries. A kind is a C struct T with abi_version, struct_size, context and free. Whoever includes
// this specialises kind_traits<T> and registry<T>::get() for it:
//
//     struct kind_traits<T> {
//         using create_fn, config;              of the C header
//         int32_t      abi_version;
//         const char * what, known, entry, default_name, needs; // for messages; the symbol of libraries; the name for NULL
//         bool         is_usable(const T &);     it has the functions that it needs
//         int32_t      check(const config *);    HOTMOE_OK, or what hotmoe_fail returned
//         std::string  made_for(const config &); " for layer 3", for messages
//     };

#include "options.h"

#include "cache/error.h"

#include <cstring>
#include <exception>
#include <list>
#include <mutex>
#include <string>

#if !defined(_WIN32)
#    include <dlfcn.h>
#endif

template <typename T> struct kind_traits;

template <typename T> struct registry_row {
    using create_fn = typename kind_traits<T>::create_fn;
    using config    = typename kind_traits<T>::config;

    std::string name;
    std::string description;
    T (*built_in)(const config & config, policy_options & options) = nullptr;
    create_fn create                                               = nullptr; // of a registered one
    void *    user_data                                            = nullptr;
};

template <typename T> struct registry {
    std::mutex                 mutex;
    std::list<registry_row<T>> rows; // a list: pointers to names stay valid when others come and go

    static registry & get();
};

//
// the registry
//

template <typename T>
int32_t registry_add(const char * name, const char * description, typename kind_traits<T>::create_fn create, void * user_data) {
    const char * what = kind_traits<T>::what;
    if (!name || !*name || std::strpbrk(name, "(),") || std::strncmp(name, "lib:", 4) == 0 || !create) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "cannot register the %s \"%s\": it needs a function and a name without parentheses and commas that does not begin with lib:",
                           what, name ? name : "");
    }
    try {
        registry<T> &               r = registry<T>::get();
        std::lock_guard<std::mutex> lock(r.mutex);
        for (const registry_row<T> & x : r.rows) {
            if (x.name == name) {
                return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "cannot register the %s \"%s\": the name is taken", what, name);
            }
        }
        r.rows.push_back({ name, description ? description : "", nullptr, create, user_data });
        return HOTMOE_OK;
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "%s \"%s\": %s", what, name, e.what());
    }
}

template <typename T> int32_t registry_take_out(const char * name) {
    registry<T> &               r = registry<T>::get();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (auto it = r.rows.begin(); name && it != r.rows.end(); ++it) {
        if (it->name == name && !it->built_in) {
            r.rows.erase(it);
            return HOTMOE_OK;
        }
    }
    return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "no %s \"%s\" was registered", kind_traits<T>::what, name ? name : "");
}

template <typename T> int32_t registry_count() {
    registry<T> &               r = registry<T>::get();
    std::lock_guard<std::mutex> lock(r.mutex);
    return (int32_t) r.rows.size();
}

template <typename T> const registry_row<T> * registry_at(int32_t i) {
    registry<T> &               r = registry<T>::get();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (const registry_row<T> & x : r.rows) {
        if (i-- == 0) {
            return &x;
        }
    }
    return nullptr;
}

//
// making objects
//

template <typename T> int32_t registry_from_library(const std::string & path, const typename kind_traits<T>::config & config, T & out) {
    const char * what = kind_traits<T>::what;
#if defined(_WIN32)
    (void) config;
    (void) out;
    return hotmoe_fail(HOTMOE_ERR_POLICY, "%s lib:%s: shared libraries are not supported on Windows yet", what, path.c_str());
#else
    void * library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); // stays open: its objects may outlive everything
    if (!library) {
        return hotmoe_fail(HOTMOE_ERR_POLICY, "%s lib:%s: %s", what, path.c_str(), dlerror());
    }
    using entry_fn       = int32_t (*)(const typename kind_traits<T>::config *, T *);
    const entry_fn entry = (entry_fn) dlsym(library, kind_traits<T>::entry);
    if (!entry) {
        return hotmoe_fail(HOTMOE_ERR_POLICY, "%s lib:%s: the library does not export %s", what, path.c_str(), kind_traits<T>::entry);
    }
    const int32_t status = entry(&config, &out);
    if (status != HOTMOE_OK) {
        return hotmoe_fail(HOTMOE_ERR_POLICY, "%s lib:%s: %s returned %d", what, path.c_str(), kind_traits<T>::entry, status);
    }
    return HOTMOE_OK;
#endif
}

// The struct that somebody else filled in is one that this version understands.
template <typename T> int32_t registry_check_struct(const std::string & name, T & made) {
    if (made.abi_version == kind_traits<T>::abi_version && made.struct_size == sizeof(T) && kind_traits<T>::is_usable(made)) {
        return HOTMOE_OK;
    }
    const char * what = kind_traits<T>::what;
    if (made.abi_version == kind_traits<T>::abi_version && made.struct_size == sizeof(T)) {
        if (made.free) {
            made.free(made.context);
        }
        return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\" has no %s", what, name.c_str(), kind_traits<T>::needs);
    }
    return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\" was made for ABI version %u and a struct of %u bytes, this is version %d with %zu: compile it again", what,
                       name.c_str(), made.abi_version, made.struct_size, kind_traits<T>::abi_version, sizeof(T));
}

template <typename T> int32_t registry_make(const char * spec, const typename kind_traits<T>::config * config, T * out) {
    const char *  what  = kind_traits<T>::what;
    const int32_t legal = out ? kind_traits<T>::check(config) : hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s: out must be set", what);
    if (legal != HOTMOE_OK) {
        return legal;
    }
    try {
        std::string  name = spec ? spec : kind_traits<T>::default_name;
        std::string  options;
        const size_t open = name.find('(');
        if (open != std::string::npos) {
            if (name.back() != ')') {
                return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\": the parenthesis is not closed", what, name.c_str());
            }
            options = name.substr(open + 1, name.size() - open - 2);
            name.resize(open);
        }
        typename kind_traits<T>::config whole = *config;
        whole.struct_size                     = sizeof(whole);
        whole.options                         = options.c_str();

        T       made   = {};
        int32_t status = HOTMOE_OK;
        if (name.rfind("lib:", 0) == 0) {
            status = registry_from_library<T>(name.substr(4), whole, made);
        } else {
            registry_row<T> found;
            std::string     known;
            {
                registry<T> &               r = registry<T>::get();
                std::lock_guard<std::mutex> lock(r.mutex);
                for (const registry_row<T> & x : r.rows) {
                    if (x.name == name) {
                        found = x;
                    }
                    known += (known.empty() ? "" : ", ") + x.name;
                }
            }
            if (found.name.empty()) {
                return hotmoe_fail(HOTMOE_ERR_POLICY, "unknown %s \"%s\"; %s: %s", what, name.c_str(), kind_traits<T>::known, known.c_str());
            }
            if (found.built_in) {
                policy_options parsed(whole.options);
                made                    = found.built_in(whole, parsed);
                const std::string error = parsed.error();
                if (!error.empty()) {
                    if (made.free) {
                        made.free(made.context);
                    }
                    return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\": %s", what, spec, error.c_str());
                }
            } else {
                status = found.create(found.user_data, &whole, &made);
                if (status != HOTMOE_OK) {
                    return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\" could not be made%s", what, name.c_str(), kind_traits<T>::made_for(whole).c_str());
                }
            }
        }
        if (status == HOTMOE_OK) {
            status = registry_check_struct(name, made);
        }
        if (status == HOTMOE_OK) {
            *out = made;
        }
        return status;
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "%s \"%s\": %s", what, spec ? spec : "", e.what());
    }
}
