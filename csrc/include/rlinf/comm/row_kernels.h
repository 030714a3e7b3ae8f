// The innermost loops of a copy: many rows of the same length, moved as they are or cast on the way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rlinf/comm/data_type.h"

namespace rlinf::comm {

struct Rows {
  std::byte* dst;
  const std::byte* src;
  int64_t num_rows;
  int64_t dst_row_stride;  // bytes
  int64_t src_row_stride;
  int64_t length;      // elements of a row
  int64_t dst_stride;  // bytes from element to element
  int64_t src_stride;
};

using RowKernel = void (*)(const Rows&);

// Rows of this many bytes at the destination or more are written past the caches, if the caller wants that at all.
// Such a store spares the read of the line it replaces; on shorter rows the partly written lines at both ends weigh
// more. Measured (rows of 64 to 16384 bytes, Zen 5): copies gain from the shortest on, 1.15 times at 256 bytes and 1.4
// at 512; casts to an unaligned place lose below 384. On Zen 4, 256 was better than 4096 for rows of 768 to 4480 bytes.
constexpr int64_t kStreamingRowBytes = 256;

// The kernel for rows that are contiguous on both sides (`is_strided` false: the strides are not looked at) or not. A
// streaming kernel's stores are weakly ordered: call streaming_fence() before telling anybody that the bytes are there.
RowKernel find_row_kernel(InstructionSet instructions, DataType src, DataType dst, bool is_strided, bool is_streaming);

void streaming_fence();

// One table for each instruction set; kernels of contiguous rows. Null where there is none: the next lower set is
// taken.
RowKernel find_scalar_kernel(DataType src, DataType dst, bool is_streaming);
RowKernel find_strided_kernel(DataType src, DataType dst);
RowKernel find_avx2_kernel(DataType src, DataType dst, bool is_streaming);
RowKernel find_avx512_kernel(DataType src, DataType dst, bool is_streaming);

// Calls `make` with the two types as template arguments; null when there is no cast between them.
#define RLINF_DISPATCH_CAST(src, dst, make)    \
  do {                                         \
    constexpr auto kF32 = DataType::kFloat32;  \
    constexpr auto kB16 = DataType::kBfloat16; \
    constexpr auto kF16 = DataType::kFloat16;  \
    if ((src) == kF32 && (dst) == kB16)        \
      return make(kF32, kB16);                 \
    if ((src) == kF32 && (dst) == kF16)        \
      return make(kF32, kF16);                 \
    if ((src) == kB16 && (dst) == kF32)        \
      return make(kB16, kF32);                 \
    if ((src) == kB16 && (dst) == kF16)        \
      return make(kB16, kF16);                 \
    if ((src) == kF16 && (dst) == kF32)        \
      return make(kF16, kF32);                 \
    if ((src) == kF16 && (dst) == kB16)        \
      return make(kF16, kB16);                 \
  } while (false)

}  // namespace rlinf::comm
