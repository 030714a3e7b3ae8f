// Marks functions that both the kernels and their CPU model run.
#pragma once

#ifdef __CUDACC__
#define RLINF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define RLINF_HOST_DEVICE inline
#endif

namespace rlinf::comm::cuda {

constexpr unsigned kWarpLanes = 32;

}  // namespace rlinf::comm::cuda
