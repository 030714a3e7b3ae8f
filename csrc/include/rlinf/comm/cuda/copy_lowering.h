// From the rows of a copy table to the tiles of the batched copy kernel. Host code without CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "rlinf/comm/cuda/copy_tile.h"

namespace rlinf::comm::cuda {

struct CopyDimension {
  int64_t length;
  int64_t source_stride;       // bytes
  int64_t destination_stride;  // bytes
};

// One row of a copy table with its addresses. The dtype codes are those of the table: 0 float32, 1 bfloat16, 2 float16,
// then elements of 1, 2, 4, 8 and 16 bytes. Codes that differ are a cast among the first three.
struct StridedCopy {
  uint64_t source;
  uint64_t destination;
  uint8_t source_dtype;
  uint8_t destination_dtype;
  std::vector<CopyDimension> dimensions;
};

// Appends the tiles of one copy; the same copy always gives the same tiles. Every tile has at most kMaxTileUnits units.
// Throws UserError for unknown codes, codes that cannot be cast into each other, a cast whose addresses or strides are
// not multiples of the element, and a destination stride of 0 on a dimension longer than 1 (lanes would race).
void lower_copy(const StridedCopy& copy, std::vector<CopyTile>& tiles);

// Whether there is anything to copy. Throws as lower_copy does.
bool has_elements(const StridedCopy& copy);

// What the kernel does, on the CPU: every lane of every tile, with the kernel's own index arithmetic.
void run_tiles_on_cpu(const CopyTile* tiles, uint64_t num_tiles);

}  // namespace rlinf::comm::cuda
