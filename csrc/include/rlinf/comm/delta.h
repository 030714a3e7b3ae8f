// What changed between two versions of a buffer, bit for bit, in a few bytes.
//
// Little-endian, and meant for one run of one version of this package:
//   header   24 bytes: magic "RLD1", element bytes (uint32), bytes of the buffer (uint64), changed elements (uint64)
//   chunks   one uint16 for each 4096 elements: how they are encoded (2 high bits) and how many changed (the others)
//   content  chunk after chunk, packed: kNone   nothing
//                                       kList   the positions (uint16, increasing), then the values
//                                       kBitmap a bit for each element, in whole uint64, then the values
//                                       kDense  all elements
// Each chunk is what takes the fewest bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rlinf/comm/data_type.h"

namespace rlinf::comm {

constexpr size_t kDeltaChunkElements = 4096;

struct DeltaSize {
  uint64_t num_bytes;    // of the delta; 0: it would be no smaller than the buffer
  uint64_t num_changed;  // elements whose bits differ
};

// Writes to `out` (room for num_bytes) what takes `snapshot` to `current`, and makes `snapshot` equal to `current`,
// also when no delta comes of it. `element_bytes` is 1, 2, 4 or 8, and num_bytes a multiple of it; no alignment is
// needed. `current` must not change meanwhile.
DeltaSize encode_delta(const std::byte* current, std::byte* snapshot, uint64_t num_bytes, uint32_t element_bytes,
                       std::byte* out, InstructionSet instructions);

// Brings `buffer` to the next version. Returns nullptr, or why the delta is refused: all of it is checked before the
// first write, so that a refused one leaves the buffer as it was. The delta must not change meanwhile.
const char* apply_delta(std::byte* buffer, uint64_t num_bytes, const std::byte* delta, uint64_t delta_bytes);

}  // namespace rlinf::comm
