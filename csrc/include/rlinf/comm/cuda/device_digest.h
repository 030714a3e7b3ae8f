// Digests of device memory, equal to those of rlinf/comm/digest.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "rlinf/comm/cuda/digest_tile.h"
#include "rlinf/comm/cuda/digested_copy_tile.h"

namespace rlinf::comm::cuda {

// Enqueues the kernel, which adds each tile's digest to device_sums[tile.piece]; the caller zeroes the sums before.
// Tiles and sums lie in device memory and must live until the stream has passed.
void device_digest(const DigestTile* device_tiles, uint64_t num_tiles, Digest* device_sums, int max_blocks,
                   cudaStream_t stream);

// The same for tiles that are copied, too; the sums are those of what is written.
void digested_copy(const DigestedCopyTile* device_tiles, uint64_t num_tiles, Digest* device_sums, int max_blocks,
                   cudaStream_t stream);

}  // namespace rlinf::comm::cuda
