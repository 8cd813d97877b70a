// Entry points of the driver that kernels' hosts ask for: tensor maps.
#include "runtime/state.h"
#include "machine/tensor_map.h"

namespace ptxsim {

API CUresult ptxsim_cuTensorMapEncodeTiled(CUtensorMap* m, CUtensorMapDataType dt, cuuint32_t rank, void* base,
                                           const cuuint64_t* gd, const cuuint64_t* gs, const cuuint32_t* box,
                                           const cuuint32_t* es, CUtensorMapInterleave il, CUtensorMapSwizzle sw,
                                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  node("tensor_map_encode", nullptr, "");
  auto bad = [&](const std::string& s) {
    setReport("cuTensorMapEncodeTiled: " + s);
    return CUDA_ERROR_INVALID_VALUE;
  };
  static const u8 esz[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if ((int)dt > 12) return bad(strf("data type %d is not supported", (int)dt));
  if (rank < 1 || rank > 5) return bad("rank");
  if ((u64)base & 15) return bad("the global address is not 16-byte aligned");
  if (il != CU_TENSOR_MAP_INTERLEAVE_NONE) return bad("interleaved layouts are not supported");
  if ((int)sw > 3) return bad(strf("swizzle mode %d is not supported", (int)sw));
  TMap t = {};
  t.magic = kTMapMagic;
  t.dtype = (u8)dt;
  t.rank = (u8)rank;
  t.swizzle = (u8)sw;
  t.oobNan = fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  t.esize = esz[dt];
  t.base = (u64)base;
  for (u32 i = 0; i < rank; ++i) {
    if (gd[i] == 0 || gd[i] > (1ull << 32)) return bad(strf("dimension %u is %llu", i, (unsigned long long)gd[i]));
    if (box[i] == 0 || box[i] > 256) return bad(strf("box dimension %u is %u (1 to 256)", i, box[i]));
    if (es[i] != 1) return bad("element strides other than 1 are not supported");
    t.dim[i] = (u32)std::min<u64>(gd[i], 0xffffffffu);
    t.box[i] = (u16)box[i];
    t.estride[i] = (u8)es[i];
    if (i) {
      if (gs[i - 1] % 16 || gs[i - 1] >= (1ull << 40))
        return bad(strf("stride %u is %llu bytes (a multiple of 16 is required)", i, (unsigned long long)gs[i - 1]));
      t.stride[i - 1] = gs[i - 1];
    }
  }
  u32 inner = box[0] * t.esize;
  if (inner % 16) return bad(strf("inner box is %u bytes (a multiple of 16 is required)", inner));
  static const u32 span[] = {1u << 30, 32, 64, 128};
  if (inner > span[sw]) return bad(strf("inner box of %u bytes exceeds the swizzle span", inner));
  memset(m, 0, sizeof *m);
  memcpy(m, &t, sizeof t);
  return CUDA_SUCCESS;
}
API CUresult ptxsim_cuTensorMapReplaceAddress(CUtensorMap* m, void* a) {
  TMap t;
  memcpy(&t, m, sizeof t);
  t.base = (u64)a;
  memcpy(m, &t, sizeof t);
  return CUDA_SUCCESS;
}
API CUresult ptxsim_cuGetErrorString(CUresult r, const char** s) {
  *s = r == CUDA_SUCCESS ? "no error" : "error";
  return CUDA_SUCCESS;
}
static void* entry(const char* s) {
  std::string n = s;
  if (n == "cuTensorMapEncodeTiled") return (void*)ptxsim_cuTensorMapEncodeTiled;
  if (n == "cuTensorMapReplaceAddress") return (void*)ptxsim_cuTensorMapReplaceAddress;
  if (n == "cuGetErrorString" || n == "cuGetErrorName") return (void*)ptxsim_cuGetErrorString;
  fprintf(stderr, "ptxsim: driver entry point %s is not available\n", s);
  return nullptr;
}
API cudaError_t cudaGetDriverEntryPoint(const char* s, void** p, unsigned long long,
                                        cudaDriverEntryPointQueryResult* q) {
  node("driver_entry_point", nullptr, "");
  *p = entry(s);
  if (q) *q = *p ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *p ? cudaSuccess : E(cudaErrorNotSupported);
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* s, void** p, unsigned, unsigned long long f,
                                                 cudaDriverEntryPointQueryResult* q) {
  return cudaGetDriverEntryPoint(s, p, f, q);
}

}  // namespace ptxsim
