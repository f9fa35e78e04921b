// Which operations a simulated device takes: those of ggml's CUDA backend that the CPU kernels can compute.

#pragma once

#include "sim_device.h"

// Whether the device can compute the node, its operands being in device memory or to be copied there.
bool sim_supports_op(sim_device & device, const ggml_tensor * op);

// Whether a node whose weights lie in host memory is worth moving to the device.
bool sim_offload_op(const ggml_tensor * op);
