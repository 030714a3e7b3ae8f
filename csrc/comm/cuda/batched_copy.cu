#include <cuda_runtime.h>

#include "rlinf/comm/check.h"
#include "rlinf/comm/cuda/batched_copy.h"

namespace rlinf::comm::cuda {

namespace {

constexpr int kThreadsPerBlock = 256;
constexpr int kNumWarps = kThreadsPerBlock / 32;

__device__ __forceinline__ bool is_aligned_16(const CopyRun& run) {
  return ((run.destination | run.source) & 15) == 0;
}

// One warp per run, grid-stride over the runs: no barriers, so few blocks suffice and the rest of the device stays
// free.
__global__ void batched_copy_kernel(const CopyRun* __restrict__ runs, uint64_t num_runs) {
  const uint64_t lane = threadIdx.x % 32;
  const uint64_t first = blockIdx.x * uint64_t{kNumWarps} + threadIdx.x / 32;
  const uint64_t stride = gridDim.x * uint64_t{kNumWarps};
  for (uint64_t i = first; i < num_runs; i += stride) {
    const CopyRun run = runs[i];
    uint64_t done = 0;
    if (is_aligned_16(run)) {
      const auto* from = reinterpret_cast<const uint4*>(run.source);
      auto* to = reinterpret_cast<uint4*>(run.destination);
      const uint64_t num_vectors = run.num_bytes / sizeof(uint4);
#pragma unroll 4
      for (uint64_t v = lane; v < num_vectors; v += 32) {
        to[v] = from[v];
      }
      done = num_vectors * sizeof(uint4);
    }
    const auto* from = reinterpret_cast<const unsigned char*>(run.source);
    auto* to = reinterpret_cast<unsigned char*>(run.destination);
    for (uint64_t b = done + lane; b < run.num_bytes; b += 32) {
      to[b] = from[b];
    }
  }
}

}  // namespace

void batched_copy(const CopyRun* device_runs, uint64_t num_runs, int max_blocks, cudaStream_t stream) {
  if (num_runs == 0) {
    return;
  }
  const uint64_t wanted = (num_runs + kNumWarps - 1) / kNumWarps;
  const auto num_blocks = static_cast<unsigned>(wanted < static_cast<uint64_t>(max_blocks) ? wanted : max_blocks);
  batched_copy_kernel<<<num_blocks, kThreadsPerBlock, 0, stream>>>(device_runs, num_runs);
  RLINF_CHECK_CUDA(cudaGetLastError());
}

int num_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;  // no driver, or one that is too old, is "no device"
}

}  // namespace rlinf::comm::cuda
