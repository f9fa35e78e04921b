#pragma once

// Built-in tier managers: one file each, one row each in registry.cpp.

#include "policy/options.h"

#include "hotmoe/tier.h"

// Return a new object for the banks that config describes. What is wrong with the options is told to them.
hotmoe_tier_manager tier_none_create(const hotmoe_tier_config & config, policy_options & options);
hotmoe_tier_manager tier_readahead_create(const hotmoe_tier_config & config, policy_options & options);
