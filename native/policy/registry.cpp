// Policies and admissions by name.

#include "registry.h"

#include "policies.h"

static int32_t check_config(const char * what, const hotmoe_policy_config * config) {
    if (!config || config->n_expert < 1 || config->n_slots < 1) {
        return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s: config must be set, n_expert (%d) and n_slots (%d) at least 1", what,
                           config ? config->n_expert : 0, config ? config->n_slots : 0);
    }
    return HOTMOE_OK;
}

template <> struct kind_traits<hotmoe_policy> {
    using create_fn                            = hotmoe_policy_create_fn;
    using config                               = hotmoe_policy_config;
    static constexpr int32_t      abi_version  = HOTMOE_POLICY_ABI_VERSION;
    static constexpr const char * what         = "policy";
    static constexpr const char * known        = "known policies";
    static constexpr const char * entry        = "hotmoe_policy_entry";
    static constexpr const char * default_name = "lfru"; // see bench/policies.md
    static constexpr const char * needs        = "select_evict";
    static bool                   is_usable(const hotmoe_policy & p) { return p.select_evict != nullptr; }
    static int32_t                check(const config * c) { return check_config(what, c); }
    static std::string            made_for(const config & c) { return " for layer " + std::to_string(c.layer); }
};

template <> struct kind_traits<hotmoe_admission> {
    using create_fn                            = hotmoe_admission_create_fn;
    using config                               = hotmoe_policy_config;
    static constexpr int32_t      abi_version  = HOTMOE_POLICY_ABI_VERSION;
    static constexpr const char * what         = "admission";
    static constexpr const char * known        = "known admissions";
    static constexpr const char * entry        = "hotmoe_admission_entry";
    static constexpr const char * default_name = "always";
    static constexpr const char * needs        = "";
    static bool                   is_usable(const hotmoe_admission &) { return true; }
    static int32_t                check(const config * c) { return check_config(what, c); }
    static std::string            made_for(const config & c) { return " for layer " + std::to_string(c.layer); }
};

template <> registry<hotmoe_policy> & registry<hotmoe_policy>::get() {
    static registry r = { {}, {
                                  { "lru", "least recently used", policy_lru_create },
                                  { "slru", "segmented LRU: 20 % on probation, 80 % protected (protected=0.8)", policy_slru_create },
                                  { "lfu", "least frequently used, counts halve every 64 tokens (half_life=64)", policy_lfu_create },
                                  { "fifo", "first in, first out", policy_fifo_create },
                                  { "lfru", "frequency over age since the last use (half_life=32, grace=8)", policy_lfru_create },
                                  { "lrfu", "recency and frequency in one: every use halves in weight every 16 tokens (half_life=16)", policy_lrfu_create },
                                  { "s3fifo", "three queues: small, main, ghost (small=0.1)", policy_s3fifo_create },
                                  { "least-stale", "experts of the last tokens stay, the others go first in, first out (window=2)", policy_least_stale_create },
                                  { "static", "a list of experts to keep, hottest first (pins=3 5 7, or 0:3 5 7;1:2 4 by layer; in Python profile=FILE, a trace or an imatrix)", policy_static_create },
                                  { "random", "any candidate (seed=0)", policy_random_create },
                              } };
    return r;
}

template <> registry<hotmoe_admission> & registry<hotmoe_admission>::get() {
    static registry r = { {}, {
                                  { "always", "every expert that missed keeps its slot", admission_always_create },
                                  { "second-miss", "an expert keeps its slot when it is needed for the second time within 64 tokens (memory=64)", admission_second_miss_create },
                                  { "ghost", "an expert keeps its slot if it lost or was refused one not long ago (size=1)", admission_ghost_create },
                              } };
    return r;
}

//
// the C functions
//

int32_t hotmoe_policy_register(const char * name, const char * description, hotmoe_policy_create_fn create, void * user_data) {
    return registry_add<hotmoe_policy>(name, description, create, user_data);
}

int32_t hotmoe_admission_register(const char * name, const char * description, hotmoe_admission_create_fn create, void * user_data) {
    return registry_add<hotmoe_admission>(name, description, create, user_data);
}

int32_t hotmoe_policy_unregister(const char * name) {
    return registry_take_out<hotmoe_policy>(name);
}

int32_t hotmoe_admission_unregister(const char * name) {
    return registry_take_out<hotmoe_admission>(name);
}

int32_t hotmoe_policy_count(void) {
    return registry_count<hotmoe_policy>();
}

int32_t hotmoe_admission_count(void) {
    return registry_count<hotmoe_admission>();
}

const char * hotmoe_policy_name(int32_t i) {
    const auto * r = registry_at<hotmoe_policy>(i);
    return r ? r->name.c_str() : nullptr;
}

const char * hotmoe_admission_name(int32_t i) {
    const auto * r = registry_at<hotmoe_admission>(i);
    return r ? r->name.c_str() : nullptr;
}

const char * hotmoe_policy_description(int32_t i) {
    const auto * r = registry_at<hotmoe_policy>(i);
    return r ? r->description.c_str() : nullptr;
}

const char * hotmoe_admission_description(int32_t i) {
    const auto * r = registry_at<hotmoe_admission>(i);
    return r ? r->description.c_str() : nullptr;
}

const char * hotmoe_policy_default(void) {
    return kind_traits<hotmoe_policy>::default_name;
}

const char * hotmoe_admission_default(void) {
    return kind_traits<hotmoe_admission>::default_name;
}

int32_t hotmoe_policy_create(const char * name, const hotmoe_policy_config * config, hotmoe_policy * out) {
    return registry_make<hotmoe_policy>(name, config, out);
}

int32_t hotmoe_admission_create(const char * name, const hotmoe_policy_config * config, hotmoe_admission * out) {
    return registry_make<hotmoe_admission>(name, config, out);
}
