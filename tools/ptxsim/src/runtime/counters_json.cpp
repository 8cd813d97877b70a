// Counters and stream operations as JSON.
#include "runtime/state.h"

namespace ptxsim {

std::map<std::string, Totals> g_totals;  // by kernel
std::vector<std::string> g_nodes;        // stream operations in order, as JSON
std::map<std::string, u64> g_nodeCount;
static std::string insJson(const u64* cls) {
  u64 g[G_COUNT] = {}, n = 0;
  for (int i = 0; i < C_COUNT; ++i) {
    g[clsGroup(i)] += cls[i];
    n += cls[i];
  }
  auto list = [](const u64* v, const char* const* name, int c) {
    std::string o;
    for (int i = 0; i < c; ++i)
      if (v[i]) o += strf("%s\"%s\":%llu", o.empty() ? "" : ",", name[i], U(v[i]));
    return o;
  };
  return strf("\"warp_instructions\":%llu,\"groups\":{%s},\"classes\":{%s}", U(n), list(g, kGrpName, G_COUNT).c_str(),
              list(cls, kClsName, C_COUNT).c_str());
}
static std::string spreadJson(const Spread& s) {
  return strf("{\"min\":%llu,\"mean\":%.1f,\"max\":%llu}", U(s.n ? s.min : 0), s.n ? (double)s.sum / (double)s.n : 0.0,
              U(s.max));
}
std::string statsJson(const Stats& s, const PerCta& c) {
  u64 all[C_COUNT] = {};
  for (auto& r : s.cls)
    for (int i = 0; i < C_COUNT; ++i) all[i] += r[i];
  std::string j = strf("%s,\"thread_instructions\":%llu,\"regions\":{", insJson(all).c_str(), U(s.threadInsts));
  bool first = true;
  for (int r = 1; r < kRegions; ++r) {
    bool any = false;
    for (u64 x : s.cls[r]) any |= x != 0;
    if (any) {
      j += strf("%s\"%d\":{%s}", first ? "" : ",", r, insJson(s.cls[r]).c_str());
      first = false;
    }
  }
  j += strf("},\n  \"mma_macs\":%llu,\"wgmma_macs\":%llu,", U(s.mmaMacs), U(s.wgmmaMacs));
  auto eff = [](u64 b, u64 sec) { return sec ? (double)b / (32.0 * (double)sec) : 1.0; };
  j += strf("\"global_load\":{\"bytes\":%llu,\"sectors\":%llu,\"requests\":%llu,\"efficiency\":%.4f},", U(s.gld),
            U(s.gldSectors), U(s.gldReq), eff(s.gld, s.gldSectors));
  j += strf("\"global_store\":{\"bytes\":%llu,\"sectors\":%llu,\"requests\":%llu,\"efficiency\":%.4f},\n", U(s.gst),
            U(s.gstSectors), U(s.gstReq), eff(s.gst, s.gstSectors));
  j += strf(
      "  "
      "\"cp_async_bytes\":%llu,\"tma_load_bytes\":%llu,\"tma_store_bytes\":%llu,\"dsmem_bytes\":%llu,\"prefetch_"
      "bytes\":%llu,",
      U(s.cpAsyncBytes), U(s.tmaLoad), U(s.tmaStore), U(s.dsmem), U(s.prefetch));
  j += strf(
      "\"l2_to_sm\":{\"load_bytes\":%llu,\"load_unique_bytes\":%llu,\"cp_async_bytes\":%llu,\"tma_bytes\":%llu,\"tma_"
      "delivered_bytes\":%llu,\"per_cta\":{\"load\":%s,\"tma\":%s,\"arrived\":%s}},\n",
      U(s.l2Load), U(s.l2Unique), U(s.l2CpAsync), U(s.l2Tma), U(s.tmaDelivered), spreadJson(c.load).c_str(),
      spreadJson(c.tma).c_str(), spreadJson(c.filled).c_str());
  return j + strf(
                 "  "
                 "\"shared\":{\"requests\":%llu,\"load_bytes\":%llu,\"store_bytes\":%llu,\"wavefronts\":%llu,\"bank_"
                 "conflict_factor\":%.4f},\"atomics\":%llu,\"barriers\":%llu}",
                 U(s.smemReq), U(s.smemLd), U(s.smemSt), U(s.smemWavefronts),
                 s.smemIdeal ? (double)s.smemWavefronts / (double)s.smemIdeal : 1.0, U(s.atomics), U(s.barriers));
}
std::string summaryJson() {
  std::string j = "{\"counts\":{";
  bool first = true;
  for (auto& [k, n] : g_nodeCount) {
    j += strf("%s\"%s\":%llu", first ? "" : ",", k.c_str(), U(n));
    first = false;
  }
  j += "},\n\"kernels\":{";
  first = true;
  for (auto& [k, t] : g_totals) {
    j += strf("%s\n\"%s\":{\"launches\":%llu,", first ? "" : ",", k.c_str(), U(t.launches)) + statsJson(t.s, t.c);
    first = false;
  }
  j += "},\n\"nodes\":[";
  first = true;
  for (auto& n : g_nodes) {
    j += first ? "\n" : ",\n";
    j += n;
    first = false;
  }
  return j + "]}\n";
}
void writeSummary() {
  if (!g_cfg.summary || g_cfg.summaryFile.empty()) return;
  if (FILE* o = fopen(g_cfg.summaryFile.c_str(), "w")) {
    std::string s = summaryJson();
    fwrite(s.data(), 1, s.size(), o);
    fclose(o);
  }
}
// The list of launches in PTXSIM_STATS: a new file name starts a new list.
void writeStats(const std::string& j) {
  static std::string name;
  const char* n = g_cfg.statsFile.c_str();
  if (!*n) return;
  FILE* o = name == g_cfg.statsFile ? fopen(n, "r+") : nullptr;
  const bool more = o != nullptr;
  if (!o) o = fopen(n, "w");
  if (!o) return;
  name = g_cfg.statsFile;
  if (more) {
    fseek(o, -3, SEEK_END);
    fprintf(o, ",\n%s\n]\n", j.c_str());
  } else
    fprintf(o, "[\n%s\n]\n", j.c_str());
  fclose(o);
}
u64 streamId(cudaStream_t s) {
  u64 h = (u64)s;
  return h < 16 ? 0 : h / 16 - 0x1000;
}  // 0: a default stream; others in order of creation
void node(const char* kind, cudaStream_t st, const std::string& more) {
  if (!g_cfg.stats) return;
  std::lock_guard<std::recursive_mutex> l(g_mu);
  g_nodeCount[kind]++;
  g_nodes.push_back(
      strf("{\"node\":\"%s\",\"stream\":%llu%s%s}", kind, U(streamId(st)), more.empty() ? "" : ",", more.c_str()));
  static std::once_flag once;
  if (g_cfg.summary) std::call_once(once, [] { atexit(writeSummary); });
}
std::string attrJson(const cudaLaunchAttribute* a, unsigned n) {
  static const std::map<int, const char*> names = {
      {cudaLaunchAttributeAccessPolicyWindow, "access_policy_window"},
      {cudaLaunchAttributeCooperative, "cooperative"},
      {cudaLaunchAttributeClusterDimension, "cluster_dimension"},
      {cudaLaunchAttributeClusterSchedulingPolicyPreference, "cluster_scheduling_policy"},
      {cudaLaunchAttributeProgrammaticStreamSerialization, "programmatic_stream_serialization"},
      {cudaLaunchAttributeProgrammaticEvent, "programmatic_event"},
      {cudaLaunchAttributePriority, "priority"},
      {cudaLaunchAttributeMemSyncDomainMap, "mem_sync_domain_map"},
      {cudaLaunchAttributeMemSyncDomain, "mem_sync_domain"},
      {cudaLaunchAttributePreferredClusterDimension, "preferred_cluster_dimension"},
      {cudaLaunchAttributeLaunchCompletionEvent, "launch_completion_event"},
      {cudaLaunchAttributePreferredSharedMemoryCarveout, "preferred_shared_memory_carveout"}};
  std::string j;
  for (unsigned i = 0; i < n; ++i) {
    int id = (int)a[i].id;
    if (id == cudaLaunchAttributeIgnore) continue;
    auto it = names.find(id);
    const auto& v = a[i].val;
    std::string val = id == cudaLaunchAttributeClusterDimension
                          ? strf("[%u,%u,%u]", v.clusterDim.x, v.clusterDim.y, v.clusterDim.z)
                      : id == cudaLaunchAttributeProgrammaticStreamSerialization
                          ? (v.programmaticStreamSerializationAllowed ? "true" : "false")
                      : id == cudaLaunchAttributeCooperative ? (v.cooperative ? "true" : "false")
                      : id == cudaLaunchAttributePriority    ? strf("%d", v.priority)
                                                             : "true";
    j += strf("%s\"%s\":%s", j.empty() ? "" : ",", it == names.end() ? strf("attribute_%d", id).c_str() : it->second,
              val.c_str());
  }
  return "{" + j + "}";
}

}  // namespace ptxsim
