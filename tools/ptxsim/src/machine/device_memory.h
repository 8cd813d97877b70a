// Allocations of device memory, and the host arrays that serve as such.
#pragma once
#include "number.h"
#include <string>
#include <vector>

namespace ptxsim {

struct Alloc {
  u64 base;
  u64 size;
  u8* map;
  size_t mapBytes;
  bool host;
  std::vector<u8> init;
  bool tracked;
};
void* devAlloc(size_t bytes);
bool devFree(void* p);
Alloc* findAlloc(u64 addr);
void regHost(void* p, size_t bytes);
void unregHost(void* p);
void markInit(u64 addr, u64 bytes);
u64 allocGen();
std::string describeAddr(u64 addr);

}  // namespace ptxsim
