#include <cuda_runtime.h>

#include "rlinf/comm/check.h"
#include "rlinf/comm/cuda/device_digest.h"

namespace rlinf::comm::cuda {

namespace {

constexpr int kThreadsPerBlock = 256;
constexpr int kNumWarps = kThreadsPerBlock / kWarpLanes;

__device__ __forceinline__ Wide sum_over_warp(Wide sum) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const auto low = static_cast<unsigned long long>(sum);
    const auto high = static_cast<unsigned long long>(sum >> 64);
    const unsigned long long other_low = __shfl_down_sync(0xffffffffu, low, distance);
    const unsigned long long other_high = __shfl_down_sync(0xffffffffu, high, distance);
    sum += (static_cast<Wide>(other_high) << 64) | other_low;
  }
  return sum;
}

// 128-bit addition out of two atomics: each addition to the low word sees the word before it, and so its own carry.
__device__ __forceinline__ void add_to(Digest* target, Wide sum) {
  const auto low = static_cast<unsigned long long>(sum);
  const auto high = static_cast<unsigned long long>(sum >> 64);
  const unsigned long long before = atomicAdd(reinterpret_cast<unsigned long long*>(&target->low), low);
  const unsigned long long carry = before + low < before ? 1 : 0;
  atomicAdd(reinterpret_cast<unsigned long long*>(&target->high), high + carry);
}

__global__ void __launch_bounds__(kThreadsPerBlock)
    digest_kernel(const DigestTile* __restrict__ tiles, uint64_t num_tiles, Digest* sums) {
  const uint32_t lane = threadIdx.x % kWarpLanes;
  const uint64_t first = blockIdx.x * uint64_t{kNumWarps} + threadIdx.x / kWarpLanes;
  for (uint64_t i = first; i < num_tiles; i += gridDim.x * uint64_t{kNumWarps}) {
    const DigestTile tile = tiles[i];
    const Wide sum = sum_over_warp(digest_lane(tile, lane));
    if (lane == 0) {
      add_to(sums + tile.piece, sum);
    }
  }
}

__global__ void __launch_bounds__(kThreadsPerBlock)
    digested_copy_kernel(const DigestedCopyTile* __restrict__ tiles, uint64_t num_tiles, Digest* sums) {
  const uint32_t lane = threadIdx.x % kWarpLanes;
  const uint64_t first = blockIdx.x * uint64_t{kNumWarps} + threadIdx.x / kWarpLanes;
  for (uint64_t i = first; i < num_tiles; i += gridDim.x * uint64_t{kNumWarps}) {
    const DigestedCopyTile tile = tiles[i];
    const Wide sum = sum_over_warp(copy_and_digest_lane(tile, lane));
    if (lane == 0) {
      add_to(sums + tile.piece, sum);
    }
  }
}

unsigned num_blocks_of(uint64_t num_tiles, int max_blocks) {
  RLINF_CHECK_USER(max_blocks > 0, "max_ctas=", max_blocks, " runs nothing; allowed: 1 or more");
  const uint64_t wanted = (num_tiles + kNumWarps - 1) / kNumWarps;
  return static_cast<unsigned>(wanted < static_cast<uint64_t>(max_blocks) ? wanted : max_blocks);
}

}  // namespace

void digested_copy(const DigestedCopyTile* device_tiles, uint64_t num_tiles, Digest* device_sums, int max_blocks,
                   cudaStream_t stream) {
  const unsigned num_blocks = num_blocks_of(num_tiles, max_blocks);
  if (num_blocks == 0) {
    return;
  }
  digested_copy_kernel<<<num_blocks, kThreadsPerBlock, 0, stream>>>(device_tiles, num_tiles, device_sums);
  RLINF_CHECK_CUDA(cudaGetLastError());
}

void device_digest(const DigestTile* device_tiles, uint64_t num_tiles, Digest* device_sums, int max_blocks,
                   cudaStream_t stream) {
  const unsigned num_blocks = num_blocks_of(num_tiles, max_blocks);
  if (num_blocks == 0) {
    return;
  }
  digest_kernel<<<num_blocks, kThreadsPerBlock, 0, stream>>>(device_tiles, num_tiles, device_sums);
  RLINF_CHECK_CUDA(cudaGetLastError());
}

}  // namespace rlinf::comm::cuda
