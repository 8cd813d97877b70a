// What dispatch needs to know of a device. Always an argument: plan/ never asks the driver.
#pragma once
#include <cstdint>

namespace pyquant {

struct DeviceInfo {
  int32_t sm = 0;  // compute capability times ten: 80, 86, 89, 90, 100, 120
  int32_t sm_count = 0;
  int64_t shared_bytes = 0;  // opt-in shared memory of one block
  int64_t l2_bytes = 0;
};

}  // namespace pyquant
