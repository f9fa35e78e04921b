#pragma once

// Built-in policies and admissions: one file each, one row each in registry.cpp.

#include "options.h"

#include "hotmoe/policy.h"

// Return a new object for the bank that config describes. What is wrong with the options is told to them.
hotmoe_policy policy_lru_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_slru_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_lfu_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_fifo_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_lfru_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_lrfu_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_s3fifo_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_least_stale_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_static_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_policy policy_random_create(const hotmoe_policy_config & config, policy_options & options);

hotmoe_admission admission_always_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_admission admission_second_miss_create(const hotmoe_policy_config & config, policy_options & options);
hotmoe_admission admission_ghost_create(const hotmoe_policy_config & config, policy_options & options);
