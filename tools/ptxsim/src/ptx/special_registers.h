// Special registers, by their names in PTX.
#pragma once
#include <string>

namespace ptxsim {

#define PTXSIM_SPECIAL_REGISTERS(X)                 \
  X(SR_TID_X, "%tid.x")                             \
  X(SR_TID_Y, "%tid.y")                             \
  X(SR_TID_Z, "%tid.z")                             \
  X(SR_NTID_X, "%ntid.x")                           \
  X(SR_NTID_Y, "%ntid.y")                           \
  X(SR_NTID_Z, "%ntid.z")                           \
  X(SR_CTAID_X, "%ctaid.x")                         \
  X(SR_CTAID_Y, "%ctaid.y")                         \
  X(SR_CTAID_Z, "%ctaid.z")                         \
  X(SR_NCTAID_X, "%nctaid.x")                       \
  X(SR_NCTAID_Y, "%nctaid.y")                       \
  X(SR_NCTAID_Z, "%nctaid.z")                       \
  X(SR_LANEID, "%laneid")                           \
  X(SR_WARPID, "%warpid")                           \
  X(SR_NWARPID, "%nwarpid")                         \
  X(SR_SMID, "%smid")                               \
  X(SR_NSMID, "%nsmid")                             \
  X(SR_GRIDID, "%gridid")                           \
  X(SR_CLUSTERID_X, "%clusterid.x")                 \
  X(SR_CLUSTERID_Y, "%clusterid.y")                 \
  X(SR_CLUSTERID_Z, "%clusterid.z")                 \
  X(SR_NCLUSTERID_X, "%nclusterid.x")               \
  X(SR_NCLUSTERID_Y, "%nclusterid.y")               \
  X(SR_NCLUSTERID_Z, "%nclusterid.z")               \
  X(SR_CLUSTER_CTAID_X, "%cluster_ctaid.x")         \
  X(SR_CLUSTER_CTAID_Y, "%cluster_ctaid.y")         \
  X(SR_CLUSTER_CTAID_Z, "%cluster_ctaid.z")         \
  X(SR_CLUSTER_NCTAID_X, "%cluster_nctaid.x")       \
  X(SR_CLUSTER_NCTAID_Y, "%cluster_nctaid.y")       \
  X(SR_CLUSTER_NCTAID_Z, "%cluster_nctaid.z")       \
  X(SR_CLUSTER_CTARANK, "%cluster_ctarank")         \
  X(SR_CLUSTER_NCTARANK, "%cluster_nctarank")       \
  X(SR_IS_EXPLICIT_CLUSTER, "%is_explicit_cluster") \
  X(SR_LANEMASK_EQ, "%lanemask_eq")                 \
  X(SR_LANEMASK_LT, "%lanemask_lt")                 \
  X(SR_LANEMASK_LE, "%lanemask_le")                 \
  X(SR_LANEMASK_GT, "%lanemask_gt")                 \
  X(SR_LANEMASK_GE, "%lanemask_ge")                 \
  X(SR_CLOCK, "%clock")                             \
  X(SR_CLOCK_HI, "%clock_hi")                       \
  X(SR_CLOCK64, "%clock64")                         \
  X(SR_GLOBALTIMER, "%globaltimer")                 \
  X(SR_GLOBALTIMER_LO, "%globaltimer_lo")           \
  X(SR_GLOBALTIMER_HI, "%globaltimer_hi")           \
  X(SR_DYNAMIC_SMEM_SIZE, "%dynamic_smem_size")     \
  X(SR_TOTAL_SMEM_SIZE, "%total_smem_size")         \
  X(SR_AGGR_SMEM_SIZE, "%aggr_smem_size")

enum SReg : int {
#define PTXSIM_NAME(id, name) id,
  PTXSIM_SPECIAL_REGISTERS(PTXSIM_NAME)
#undef PTXSIM_NAME
};

// -1: no special register.
inline int sregByName(const std::string& s) {
#define PTXSIM_FIND(id, name) \
  if (s == name) return id;
  PTXSIM_SPECIAL_REGISTERS(PTXSIM_FIND)
#undef PTXSIM_FIND
  return -1;
}

}  // namespace ptxsim
