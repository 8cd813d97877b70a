// Sectors of global memory, wavefronts of shared memory.
#include "machine/machine.h"

namespace ptxsim {

void statShared(Warp& w, const u32* addr, u32 mask, u32 bytes, bool write) {
  Stats& s = w.cl->st;
  // lanes are served in groups so that one pass moves at most 128 bytes
  int per = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  s.smemReq++;
  (write ? s.smemSt : s.smemLd) += (u64)__builtin_popcount(mask) * bytes;
  for (int g = 0; g < 32; g += per) {
    u32 words[32][16];
    int cnt[32] = {};
    bool any = false;
    for (int i = g; i < g + per; ++i)
      if (mask >> i & 1)
        for (u32 b = 0; b < bytes; b += 4) {
          u32 wd = (addr[i] + b) >> 2, bank = wd & 31;
          bool dup = false;
          any = true;
          for (int k = 0; k < cnt[bank] && k < 16; ++k)
            if (words[bank][k] == wd) dup = true;
          if (!dup) {
            if (cnt[bank] < 16) words[bank][cnt[bank]] = wd;
            cnt[bank]++;
          }
        }
    int mx = 0;
    for (int b = 0; b < 32; ++b) mx = std::max(mx, cnt[b]);
    s.smemWavefronts += mx;
    if (any) s.smemIdeal += 1;
  }
}
// Without a model of the L1 cache: |l2Load| counts every request's sectors (nothing hits L1), |l2Unique| each sector
// once per CTA (everything hits).
void statGlobal(Warp& w, const u64* addr, u32 mask, u32 bytes, GlobalUse use) {
  Stats& s = w.cl->st;
  u64 sec[512];
  int n = 0;
  FOR_LANES(i, mask) for (u64 x = addr[i] >> 5; x <= (addr[i] + bytes - 1) >> 5; ++x) {
    bool d = false;
    for (int k = n; k-- > 0;)
      if (sec[k] == x) {
        d = true;
        break;
      }
    if (!d && n < 512) sec[n++] = x;
  }
  u64 b = (u64)__builtin_popcount(mask) * bytes;
  if (use == GU_STORE) {
    s.gst += b;
    s.gstSectors += n;
    s.gstReq++;
    return;
  }
  s.gld += b;
  s.gldSectors += n;
  s.gldReq++;
  w.cta->l2Load += 32ull * (u64)n;
  if (use == GU_ASYNC) {
    s.l2CpAsync += 32ull * (u64)n;
    return;
  }
  s.l2Load += 32ull * (u64)n;
  for (int k = 0; k < n; ++k)
    if (w.cta->sectors.add(sec[k])) s.l2Unique += 32;
}

}  // namespace ptxsim
