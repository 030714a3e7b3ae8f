// The part of NCCL's C interface that this package calls, declared anew, so that nothing of NCCL is needed to build.
// Facts (values, field order, argument order) from the public header nccl.h of NCCL 2.27.3, the oldest version that is
// supported; ncclCommGetUniqueId, ncclCommGrow, ncclCommRevoke and ncclCommSuspend/Resume from that of 2.32.3. NCCL
// reads as many bytes of a Config as its `size` says and takes defaults for the rest, so that an older struct goes into
// a newer library.
#pragma once

#include <climits>
#include <cstddef>

namespace rlinf::comm::nccl {

constexpr int kOldestVersion = 22703;  // major * 10000 + minor * 100 + patch

struct UniqueId {
  char bytes[128];
};

enum Result : int { kSuccess = 0, kInProgress = 7 };
constexpr int kUint8 = 1;  // ncclDataType_t
constexpr int kShrinkAbort = 1;
constexpr int kSuspendMemory = 1;
constexpr int kUndefined = INT_MIN;

struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kOldestVersion;
  int blocking = 0;  // every call returns at once, and ncclCommGetAsyncError tells when it is done
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
};
static_assert(sizeof(Config) == 72, "the layout of NCCL 2.27");

using Comm = void*;
using Stream = void*;

struct Functions {
  // In every supported library.
  int (*get_version)(int* version);
  int (*get_unique_id)(UniqueId* id);
  const char* (*get_error_string)(int result);
  const char* (*get_last_error)(Comm comm);
  int (*comm_init_rank_config)(Comm* comm, int num_ranks, UniqueId id, int rank, Config* config);
  int (*comm_get_async_error)(Comm comm, int* result);
  int (*comm_finalize)(Comm comm);
  int (*comm_destroy)(Comm comm);
  int (*comm_abort)(Comm comm);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* source, size_t count, int type, int peer, Comm comm, Stream stream);
  int (*recv)(void* target, size_t count, int type, int peer, Comm comm, Stream stream);
  int (*broadcast)(const void* source, void* target, size_t count, int type, int root, Comm comm, Stream stream);
  // Null where the library has them not.
  int (*comm_split)(Comm comm, int color, int key, Comm* child, Config* config);
  int (*comm_shrink)(Comm comm, int* excluded, int num_excluded, Comm* child, Config* config, int flags);
  int (*comm_get_unique_id)(Comm comm, UniqueId* id);
  int (*comm_grow)(Comm comm, int num_ranks, const UniqueId* id, int rank, Comm* child, Config* config);
  int (*comm_revoke)(Comm comm, int flags);
  int (*comm_suspend)(Comm comm, int flags);
  int (*comm_resume)(Comm comm);
};

}  // namespace rlinf::comm::nccl
