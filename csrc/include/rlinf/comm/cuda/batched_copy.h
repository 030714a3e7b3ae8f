// Many small copies in one kernel launch: the device-side executor of a reshard plan whose pieces are short runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace rlinf::comm::cuda {

// Device addresses, of this device or of a peer that is mapped into it.
struct CopyRun {
  uint64_t destination;
  uint64_t source;
  uint64_t num_bytes;
};

// Enqueues the copies on `stream`; returns at once. `device_runs` lies in device memory and must live until the stream
// has passed. At most `max_blocks` thread blocks run, so that a copy beside a training step leaves it most of the
// device.
void batched_copy(const CopyRun* device_runs, uint64_t num_runs, int max_blocks, cudaStream_t stream);

// 0 when there is no driver.
int num_devices();

}  // namespace rlinf::comm::cuda
