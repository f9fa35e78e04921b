#pragma once

// Built-in policies: one file each, one row each in registry.cpp.

#include "hotmoe/policy.h"

// Fill in `out` with a new policy object for n_expert experts and n_slots slots.
void policy_lru_create(int32_t n_expert, int32_t n_slots, hotmoe_policy & out);
void policy_slru_create(int32_t n_expert, int32_t n_slots, hotmoe_policy & out);
void policy_lfu_create(int32_t n_expert, int32_t n_slots, hotmoe_policy & out);
void policy_fifo_create(int32_t n_expert, int32_t n_slots, hotmoe_policy & out);
