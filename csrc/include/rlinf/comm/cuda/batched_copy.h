// Many strided copies in one kernel launch: the device-side executor of a reshard plan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "rlinf/comm/cuda/copy_tile.h"

namespace rlinf::comm::cuda {

// Enqueues the copies on `stream`; returns at once. `device_tiles` lies in device memory and must live until the stream
// has passed; the tiles' addresses are of this device or of a peer that is mapped into it. At most `max_blocks` thread
// blocks run, so that a copy beside a training step leaves it most of the device.
void batched_copy(const CopyTile* device_tiles, uint64_t num_tiles, int max_blocks, cudaStream_t stream);

// 0 when there is no driver.
int num_devices();

}  // namespace rlinf::comm::cuda
