// The product of a convolution in groups, depthwise ones among them, or with few output channels: codes of images in,
// results out.
#pragma once
#include "cpu/layer.h"

namespace pyquant::cpu {

// Of a layer whose rows are the windows of `images` images (layer.rows.windows, in one group or more). The weights of
// output channel n meet the channels of its group alone; layer.extent is that of one group.
void run_groups(const Layer& layer, int64_t images);

}  // namespace pyquant::cpu
