// From a checked GEMM to its launch: alignments, the plan's route, the launch. Every CUDA op that multiplies goes
// through here.
#pragma once
#include "bind/device.h"
#include "plan/route.h"

namespace pyquant::bind {

// Memory that a call needs for itself, in one allocation: every part is asked for, then it is made. The allocator keeps
// it until the stream has passed the launches.
class Scratch {
 public:
  // Where a part of so many bytes will begin.
  int64_t add(int64_t bytes) {
    const int64_t begin = bytes_;
    bytes_ += (bytes + 255) / 256 * 256;
    return begin;
  }
  void make(const Tensor& like) {
    if (bytes_ > 0) memory_ = empty(like, {bytes_}, ScalarType::Byte);
  }
  template <class T>
  T* at(int64_t begin) const {
    if (bytes_ == 0) return nullptr;
    return reinterpret_cast<T*>(static_cast<char*>(memory_.mutable_data_ptr()) + begin);
  }

 private:
  int64_t bytes_ = 0;
  Tensor memory_;
};

// The device that launches go to.
const DeviceInfo& device_info(const On& on);
// Fills in the problem's alignments from pointers and strides.
void align(GemmProblem* problem, const GemmOperands& operands);
// The plan's route for the operands as stored in memory. The only place where bindings ask the plan. int4_range: see
// plan/route.h.
Route route_of(Entry entry, GemmProblem problem, const GemmOperands& operands, const On& on, bool int4_range = false);
// Dense rows of codes, one a byte, as rows of two a byte; an even number of columns. `keep` owns them.
const uint8_t* pack_rows(const Tensor& like, const void* codes, int64_t rows, int64_t columns, const On& on,
                         std::vector<Tensor>* keep);
// int4 activations in the packing that the route requires; problem: as they are stored. `keep` owns a copy.
void repack(const Route& route, const Tensor& like, const GemmProblem& problem, const On& on, std::vector<Tensor>* keep,
            GemmOperands* operands);
// The row of a name. Refuses an unknown name, and says why a row does not take the problem. Weights are laid
// out for the row where it does not read checkpoint order.
const Row* named(const std::string& name, const Tensor& like, const On& on, std::vector<Tensor>* keep,
                 GemmProblem* problem, GemmOperands* operands);
// The workspace that a row needs; without a row, throws every row's refusal.
cuda::Workspace workspace_of(const Row* row, const GemmProblem& problem, const GemmOperands& operands, const On& on);
// Launches a row, with its workspace on the device of `like`; without a row, throws every row's refusal.
void run(const Row* row, const GemmProblem& problem, GemmOperands operands, const Epilogue& epilogue,
         const Tensor& like, const On& on);

}  // namespace pyquant::bind
