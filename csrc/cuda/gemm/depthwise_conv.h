// Depthwise convolutions: every channel is a group of its own (grouped_conv.cu asks for them).
#pragma once
#include "cuda/gemm/call.h"

namespace pyquant::cuda {

// Whether the kernel takes a convolution in groups: one channel in and out of each, in eights that lie on 8 bytes, a
// scale a channel, and a window that is not wider than what a block holds of its weights.
bool is_depthwise(const GemmCall& call, int64_t groups);
void depthwise_conv(const GemmCall& call);

}  // namespace pyquant::cuda
