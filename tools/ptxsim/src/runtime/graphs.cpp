// Capture of a stream: its launches and fills are kept instead of run, and run in their order when the graph is
// launched. One capture at a time, of one stream; what a GPU refuses meanwhile is refused.
#include "runtime/state.h"

namespace ptxsim {

struct Graph {
  std::vector<std::function<cudaError_t(cudaStream_t)>> nodes;
};

static cudaStream_t g_captured = nullptr;  // null: none; the legacy stream cannot be captured
static cudaStreamCaptureMode g_mode = cudaStreamCaptureModeGlobal;
static Graph g_graph;
static bool g_spoilt = false;

static cudaError_t spoil(cudaError_t e, const std::string& what) {
  g_spoilt = true;
  setReport(what + " while a stream is captured");
  return E(e);
}

bool capture(cudaStream_t s, std::function<cudaError_t(cudaStream_t)> node, cudaError_t* e) {
  if (!g_captured) return false;
  if (s == g_captured) {
    g_graph.nodes.push_back(std::move(node));
    *e = cudaSuccess;
    return true;
  }
  if (s) return false;  // another stream runs on
  *e = spoil(cudaErrorStreamCaptureImplicit, "an operation on the legacy stream");
  return true;
}
cudaError_t uncapturable(const char* what, bool whenRelaxed) {
  if (!g_captured || (g_mode == cudaStreamCaptureModeRelaxed && !whenRelaxed)) return cudaSuccess;
  return spoil(cudaErrorStreamCaptureUnsupported, what);
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  if (!s) return E(cudaErrorStreamCaptureUnsupported);
  if (g_captured) return E(cudaErrorIllegalState);
  g_captured = s;
  g_mode = mode;
  g_graph = {};
  g_spoilt = false;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  *g = nullptr;
  if (!g_captured || s != g_captured) return E(cudaErrorIllegalState);
  g_captured = nullptr;
  if (g_spoilt) return E(cudaErrorStreamCaptureInvalidated);
  *g = (cudaGraph_t) new Graph(std::move(g_graph));
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  const bool own = g_captured && s == g_captured;
  *status = !own       ? cudaStreamCaptureStatusNone
            : g_spoilt ? cudaStreamCaptureStatusInvalidated
                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return E(cudaErrorNotSupported);
  *count = ((Graph*)g)->nodes.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t g, unsigned long long) {
  *exec = (cudaGraphExec_t) new Graph(*(Graph*)g);
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  for (auto& node : ((Graph*)exec)->nodes)
    if (cudaError_t e = node(s)) return e;
  return S();
}
API cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  delete (Graph*)g;
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete (Graph*)exec;
  return cudaSuccess;
}

}  // namespace ptxsim
