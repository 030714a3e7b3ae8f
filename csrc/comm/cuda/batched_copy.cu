#include <cuda_runtime.h>

#include "rlinf/comm/check.h"
#include "rlinf/comm/cuda/batched_copy.h"

namespace rlinf::comm::cuda {

namespace {

constexpr int kThreadsPerBlock = 256;
constexpr int kNumWarps = kThreadsPerBlock / kWarpLanes;

// One warp per tile, grid-stride over the tiles: no barriers, so few blocks suffice and the rest of the device is free.
__global__ void __launch_bounds__(kThreadsPerBlock)
    batched_copy_kernel(const CopyTile* __restrict__ tiles, uint64_t num_tiles) {
  const uint32_t lane = threadIdx.x % kWarpLanes;
  const uint64_t first = blockIdx.x * uint64_t{kNumWarps} + threadIdx.x / kWarpLanes;
  for (uint64_t i = first; i < num_tiles; i += gridDim.x * uint64_t{kNumWarps}) {
    const CopyTile tile = tiles[i];
    run_tile(tile, lane);
  }
}

}  // namespace

void batched_copy(const CopyTile* device_tiles, uint64_t num_tiles, int max_blocks, cudaStream_t stream) {
  RLINF_CHECK_USER(max_blocks > 0, "max_ctas=", max_blocks, " runs nothing; allowed: 1 or more");
  if (num_tiles == 0) {
    return;
  }
  const uint64_t wanted = (num_tiles + kNumWarps - 1) / kNumWarps;
  const auto num_blocks = static_cast<unsigned>(wanted < static_cast<uint64_t>(max_blocks) ? wanted : max_blocks);
  batched_copy_kernel<<<num_blocks, kThreadsPerBlock, 0, stream>>>(device_tiles, num_tiles);
  RLINF_CHECK_CUDA(cudaGetLastError());
}

int num_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;  // no driver, or one that is too old, is "no device"
}

}  // namespace rlinf::comm::cuda
