// Device memory and pinned host memory, and the translation of device pointers.

#pragma once

#include "sim_device.h"

// Fills in device.buft (needs device.dev).
void sim_init_buffer_type(sim_device & device);

// Fills in the one pinned host buffer type; like CUDA's it is shared by all devices and names the first of them.
void sim_init_host_buffer_type(ggml_backend_buffer_type & buft, ggml_backend_dev_t dev);

// The buffer a tensor lies in, through views; NULL if it has none.
ggml_backend_buffer_t sim_tensor_buffer(const ggml_tensor * tensor);

// The device that owns a buffer's memory, NULL if that is not a simulated device.
sim_device * sim_buffer_device(ggml_backend_buffer_t buffer);

// Real memory behind [ptr, ptr + size) if that lies in one live allocation of the device, else NULL. Optionally the
// allocation, which stays valid until its buffer is freed.
uint8_t * sim_translate(sim_device & device, const void * ptr, size_t size, sim_alloc * alloc = nullptr);

// Whether ptr belonged to an allocation of the device that was freed (only so many are remembered).
bool sim_is_freed(sim_device & device, const void * ptr);

// Marks host memory of others as pinned and back, as cudaHostRegister() does. False beyond the limit of the configuration.
bool sim_register_host_buffer(void * ptr, size_t size);
void sim_unregister_host_buffer(void * ptr);
