// Copies an N-d box between two strided buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rlinf::comm {

// One axis of a strided walk over two buffers.
struct CopyAxis {
  int64_t length;
  int64_t source_stride;       // bytes
  int64_t destination_stride;  // bytes
};

// Copies prod(axes.length) elements of `element_bytes`. Axes that lie contiguously in both buffers are fused, and the
// innermost contiguous run is copied at once. No axis may make source and destination overlap.
void copy_box(std::byte* destination, const std::byte* source, uint64_t element_bytes, std::vector<CopyAxis> axes);

}  // namespace rlinf::comm
