// Policies and admissions by name: the table of the built-in ones, those that were registered, and shared libraries.

#include "policies.h"

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

template <> struct kind_traits<hotmoe_policy> {
    using create_fn                            = hotmoe_policy_create_fn;
    static constexpr const char * what         = "policy";
    static constexpr const char * known        = "known policies";
    static constexpr const char * entry        = "hotmoe_policy_entry";
    static constexpr const char * default_name = "lru";
    static bool                   is_usable(const hotmoe_policy & p) { return p.select_evict != nullptr; }
};

template <> struct kind_traits<hotmoe_admission> {
    using create_fn                            = hotmoe_admission_create_fn;
    static constexpr const char * what         = "admission";
    static constexpr const char * known        = "known admissions";
    static constexpr const char * entry        = "hotmoe_admission_entry";
    static constexpr const char * default_name = "always";
    static bool                   is_usable(const hotmoe_admission &) { return true; }
};

template <typename T> struct row {
    using create_fn = typename kind_traits<T>::create_fn;

    std::string name;
    std::string description;
    T (*built_in)(const hotmoe_policy_config & config, policy_options & options) = nullptr;
    create_fn create                                                             = nullptr; // of a registered one
    void *    user_data                                                          = nullptr;
};

template <typename T> struct registry {
    std::mutex        mutex;
    std::list<row<T>> rows; // a list: pointers to names stay valid when others come and go

    static registry & get();
};

template <> registry<hotmoe_policy> & registry<hotmoe_policy>::get() {
    static registry r = { {}, {
                                  { "lru", "least recently used", policy_lru_create },
                                  { "slru", "segmented LRU: 20 % on probation, 80 % protected", policy_slru_create },
                                  { "lfu", "least frequently used, counts halve every 64 events", policy_lfu_create },
                                  { "fifo", "first in, first out", policy_fifo_create },
                              } };
    return r;
}

template <> registry<hotmoe_admission> & registry<hotmoe_admission>::get() {
    static registry r = { {}, {
                                  { "always", "every expert that missed keeps its slot", admission_always_create },
                              } };
    return r;
}

//
// the registry
//

template <typename T>
static int32_t add(const char * name, const char * description, typename kind_traits<T>::create_fn create, void * user_data) {
    const char * what = kind_traits<T>::what;
    if (!name || !*name || std::strpbrk(name, "(),") || std::strncmp(name, "lib:", 4) == 0 || !create) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "cannot register the %s \"%s\": it needs a function and a name without parentheses and commas that does not begin with lib:",
                           what, name ? name : "");
    }
    try {
        registry<T> &               r = registry<T>::get();
        std::lock_guard<std::mutex> lock(r.mutex);
        for (const row<T> & x : r.rows) {
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

template <typename T> static int32_t take_out(const char * name) {
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

template <typename T> static int32_t count() {
    registry<T> &               r = registry<T>::get();
    std::lock_guard<std::mutex> lock(r.mutex);
    return (int32_t) r.rows.size();
}

template <typename T> static const row<T> * at(int32_t i) {
    registry<T> &               r = registry<T>::get();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (const row<T> & x : r.rows) {
        if (i-- == 0) {
            return &x;
        }
    }
    return nullptr;
}

//
// making objects
//

template <typename T> static int32_t from_library(const std::string & path, const hotmoe_policy_config & config, T & out) {
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
    using entry_fn       = int32_t (*)(const hotmoe_policy_config *, T *);
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
template <typename T> static int32_t check_struct(const std::string & name, T & made) {
    if (made.abi_version == HOTMOE_POLICY_ABI_VERSION && made.struct_size == sizeof(T) && kind_traits<T>::is_usable(made)) {
        return HOTMOE_OK;
    }
    const char * what = kind_traits<T>::what;
    if (made.abi_version == HOTMOE_POLICY_ABI_VERSION && made.struct_size == sizeof(T)) {
        if (made.free) {
            made.free(made.context);
        }
        return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\" has no select_evict", what, name.c_str());
    }
    return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\" was made for ABI version %u and a struct of %u bytes, this is version %d with %zu: compile it again", what,
                       name.c_str(), made.abi_version, made.struct_size, HOTMOE_POLICY_ABI_VERSION, sizeof(T));
}

template <typename T> static int32_t make(const char * spec, const hotmoe_policy_config * config, T * out) {
    const char * what = kind_traits<T>::what;
    if (!config || !out || config->n_expert < 1 || config->n_slots < 1) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s: config and out must be set, n_expert (%d) and n_slots (%d) at least 1", what,
                           config ? config->n_expert : 0, config ? config->n_slots : 0);
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
        hotmoe_policy_config whole = *config;
        whole.struct_size          = sizeof(whole);
        whole.options              = options.c_str();

        T       made   = {};
        int32_t status = HOTMOE_OK;
        if (name.rfind("lib:", 0) == 0) {
            status = from_library<T>(name.substr(4), whole, made);
        } else {
            row<T>      found;
            std::string known;
            {
                registry<T> &               r = registry<T>::get();
                std::lock_guard<std::mutex> lock(r.mutex);
                for (const row<T> & x : r.rows) {
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
                    return hotmoe_fail(HOTMOE_ERR_POLICY, "%s \"%s\" could not be made for layer %d", what, name.c_str(), whole.layer);
                }
            }
        }
        if (status == HOTMOE_OK) {
            status = check_struct(name, made);
        }
        if (status == HOTMOE_OK) {
            *out = made;
        }
        return status;
    } catch (const std::exception & e) {
        return hotmoe_fail(HOTMOE_ERR_MEMORY, "%s \"%s\": %s", what, spec ? spec : "", e.what());
    }
}

//
// the C functions
//

int32_t hotmoe_policy_register(const char * name, const char * description, hotmoe_policy_create_fn create, void * user_data) {
    return add<hotmoe_policy>(name, description, create, user_data);
}

int32_t hotmoe_admission_register(const char * name, const char * description, hotmoe_admission_create_fn create, void * user_data) {
    return add<hotmoe_admission>(name, description, create, user_data);
}

int32_t hotmoe_policy_unregister(const char * name) {
    return take_out<hotmoe_policy>(name);
}

int32_t hotmoe_admission_unregister(const char * name) {
    return take_out<hotmoe_admission>(name);
}

int32_t hotmoe_policy_count(void) {
    return count<hotmoe_policy>();
}

int32_t hotmoe_admission_count(void) {
    return count<hotmoe_admission>();
}

const char * hotmoe_policy_name(int32_t i) {
    const auto * r = at<hotmoe_policy>(i);
    return r ? r->name.c_str() : nullptr;
}

const char * hotmoe_admission_name(int32_t i) {
    const auto * r = at<hotmoe_admission>(i);
    return r ? r->name.c_str() : nullptr;
}

const char * hotmoe_policy_description(int32_t i) {
    const auto * r = at<hotmoe_policy>(i);
    return r ? r->description.c_str() : nullptr;
}

const char * hotmoe_admission_description(int32_t i) {
    const auto * r = at<hotmoe_admission>(i);
    return r ? r->description.c_str() : nullptr;
}

const char * hotmoe_policy_default(void) {
    return kind_traits<hotmoe_policy>::default_name;
}

const char * hotmoe_admission_default(void) {
    return kind_traits<hotmoe_admission>::default_name;
}

int32_t hotmoe_policy_create(const char * name, const hotmoe_policy_config * config, hotmoe_policy * out) {
    return make<hotmoe_policy>(name, config, out);
}

int32_t hotmoe_admission_create(const char * name, const hotmoe_policy_config * config, hotmoe_admission * out) {
    return make<hotmoe_admission>(name, config, out);
}
