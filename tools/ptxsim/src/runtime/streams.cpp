// Streams and events: in order, immediate.
#include "runtime/state.h"

namespace ptxsim {

struct Event {
  std::chrono::steady_clock::time_point t;
};

static long g_handle = 0x1000;
#define NEWH(T, p) *(p) = (T)(++g_handle * 16)
API cudaError_t cudaStreamCreate(cudaStream_t* s) {
  NEWH(cudaStream_t, s);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
  NEWH(cudaStream_t, s);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  NEWH(cudaStream_t, s);
  return cudaSuccess;
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  if (cudaError_t e = uncapturable("cudaStreamSynchronize", true)) return e;
  node("stream_synchronize", s, "");
  return S();
}
API cudaError_t cudaStreamQuery(cudaStream_t) { return S(); }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t, unsigned) {
  node("event_wait", s, "");
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* f) {
  *f = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamSetAttribute(cudaStream_t, cudaStreamAttrID, const cudaStreamAttrValue*) {
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* u) {
  node("host_function", s, "");
  f(u);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* u, unsigned) {
  f(s, g_sticky, u);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = (cudaEvent_t) new Event{std::chrono::steady_clock::now()};
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (Event*)e;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  node("event_record", s, "");
  ((Event*)e)->t = std::chrono::steady_clock::now();
  return S();
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  if (cudaError_t e = uncapturable("cudaEventSynchronize", true)) return e;
  node("event_synchronize", nullptr, "");
  return S();
}
API cudaError_t cudaEventQuery(cudaEvent_t) { return S(); }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = std::chrono::duration<float, std::milli>(((Event*)b)->t - ((Event*)a)->t).count();
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // namespace ptxsim
