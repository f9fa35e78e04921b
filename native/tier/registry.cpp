// Tier managers by name.

#include "policy/registry.h"

#include "tiers.h"

template <> struct kind_traits<hotmoe_tier_manager> {
    using create_fn                            = hotmoe_tier_create_fn;
    using config                               = hotmoe_tier_config;
    static constexpr int32_t      abi_version  = HOTMOE_TIER_ABI_VERSION;
    static constexpr const char * what         = "tier manager";
    static constexpr const char * known        = "known tier managers";
    static constexpr const char * entry        = "hotmoe_tier_entry";
    static constexpr const char * default_name = "none";
    static constexpr const char * needs        = "on_step";
    static bool                   is_usable(const hotmoe_tier_manager & m) { return m.on_step != nullptr; }
    static std::string            made_for(const config &) { return ""; }

    static int32_t check(const config * c) {
        if (!c || c->n_banks < 1 || !c->banks) {
            return hotmoe_fail(HOTMOE_ERR_ARGUMENT, "%s: config must be set, n_banks (%d) at least 1", what, c ? c->n_banks : 0);
        }
        return HOTMOE_OK;
    }
};

template <> registry<hotmoe_tier_manager> & registry<hotmoe_tier_manager>::get() {
    static registry r = { {}, {
                                  { "none", "the page cache decides alone", tier_none_create },
                                  { "readahead", "reads ahead what enters host memory, lets go of what it drops", tier_readahead_create },
                              } };
    return r;
}

int32_t hotmoe_tier_register(const char * name, const char * description, hotmoe_tier_create_fn create, void * user_data) {
    return registry_add<hotmoe_tier_manager>(name, description, create, user_data);
}

int32_t hotmoe_tier_unregister(const char * name) {
    return registry_take_out<hotmoe_tier_manager>(name);
}

int32_t hotmoe_tier_count(void) {
    return registry_count<hotmoe_tier_manager>();
}

const char * hotmoe_tier_name(int32_t i) {
    const auto * r = registry_at<hotmoe_tier_manager>(i);
    return r ? r->name.c_str() : nullptr;
}

const char * hotmoe_tier_description(int32_t i) {
    const auto * r = registry_at<hotmoe_tier_manager>(i);
    return r ? r->description.c_str() : nullptr;
}

const char * hotmoe_tier_default(void) {
    return kind_traits<hotmoe_tier_manager>::default_name;
}

int32_t hotmoe_tier_create(const char * name, const hotmoe_tier_config * config, hotmoe_tier_manager * out) {
    return registry_make<hotmoe_tier_manager>(name, config, out);
}
