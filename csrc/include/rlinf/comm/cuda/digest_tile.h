// The unit of work of the digest kernel, and the code that sums it, shared by kernel and CPU model. The digest is that
// of rlinf/comm/digest.h; the tests hold the two against each other.
#pragma once

#include <cstdint>

#include "rlinf/comm/cuda/copy_tile.h"
#include "rlinf/comm/cuda/portable.h"
#include "rlinf/comm/digest.h"

namespace rlinf::comm::cuda {

using Wide = unsigned __int128;

// A rectangle of elements, or of whole words where a row is contiguous in memory and in the flat index.
struct DigestTile {
  uint64_t address;
  uint64_t first_index;        // elements; words for tiles of words
  int64_t row_memory_stride;   // bytes
  int64_t row_index_stride;    // like first_index
  int64_t unit_memory_stride;  // bytes
  int64_t unit_index_stride;   // like first_index
  uint32_t num_columns;
  uint32_t num_rows;
  uint32_t reciprocal;
  uint32_t piece;        // which sum it adds to
  uint8_t element_log2;  // of bytes, 0 to 3
  uint8_t load_log2;     // of bytes: widest load that the tile's addresses allow, at most its unit
  uint8_t is_words;
  uint8_t reserved[5];
};
static_assert(sizeof(DigestTile) == 72, "the layout that the host uploads");

RLINF_HOST_DEVICE uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
#endif
}

// K(word_index) of rlinf/comm/digest.h.
RLINF_HOST_DEVICE Wide digest_factor(uint64_t word_index) {
  constexpr uint64_t kIndexStep = 0x9e3779b97f4a7c15;
  constexpr uint64_t kSpread = 0xbb67ae8584caa73b;
  constexpr uint64_t kDigit = (uint64_t{1} << 52) - 1;
  uint64_t state = (word_index + 1) * kIndexStep;
  state ^= state >> 32;
  state *= kSpread;
  state ^= state >> 29;
  const uint64_t upper = state >> 12;
  const uint64_t step = kIndexStep & kDigit;
  const uint64_t low = upper * step;  // of the product, of which bits 52 to 103 and then 0 to 23 are the upper digits
  const uint64_t middle = high_product(upper, step) << 12 | low >> 52;
  return (static_cast<Wide>(middle) << 52) | (static_cast<Wide>(low) << 104) | (state << 1 & kDigit) | 1;
}

// Little-endian, from loads of 2^load_log2 bytes.
RLINF_HOST_DEVICE uint64_t load_bits(uint64_t address, uint32_t unit_log2, uint32_t load_log2) {
  if (load_log2 == 3) {
    return load_unit<uint64_t>(address);
  }
  uint64_t bits = 0;
  for (uint32_t at = 0; at < (1u << unit_log2); at += 1u << load_log2) {
    const uint64_t part = load_log2 == 2   ? load_unit<uint32_t>(address + at)
                          : load_log2 == 1 ? load_unit<uint16_t>(address + at)
                                           : load_unit<uint8_t>(address + at);
    bits |= part << (8 * at);
  }
  return bits;
}

// The sum of one lane's units of the tile.
RLINF_HOST_DEVICE Wide digest_lane(const DigestTile& tile, uint32_t lane) {
  const uint32_t per_word_log2 = 3 - tile.element_log2;
  // One in the lowest bit of each element of a word.
  const uint64_t ones = tile.element_log2 == 3   ? 1
                        : tile.element_log2 == 2 ? 0x0000000100000001
                        : tile.element_log2 == 1 ? 0x0001000100010001
                                                 : 0x0101010101010101;
  const uint32_t unit_log2 = tile.is_words ? 3 : tile.element_log2;
  const uint32_t num_units = tile.num_columns * tile.num_rows;
  Wide sum = 0;
#ifdef __CUDACC__
#pragma unroll 4
#endif
  for (uint32_t unit = lane; unit < num_units; unit += kWarpLanes) {
    const uint32_t row = divide(unit, tile.reciprocal);
    const uint32_t column = unit - row * tile.num_columns;
    const uint64_t index =
        tile.first_index + static_cast<uint64_t>(row * tile.row_index_stride + column * tile.unit_index_stride);
    const uint64_t bits =
        load_bits(tile.address + static_cast<uint64_t>(row * tile.row_memory_stride + column * tile.unit_memory_stride),
                  unit_log2, tile.load_log2);
    if (tile.is_words) {
      sum += digest_factor(index) * (static_cast<Wide>(bits) + ones);
    } else {
      const uint32_t place = static_cast<uint32_t>(index) & ((1u << per_word_log2) - 1);
      sum += digest_factor(index >> per_word_log2) *
             ((static_cast<Wide>(bits) + 1) << ((8u << tile.element_log2) * place));
    }
  }
  return sum;
}

}  // namespace rlinf::comm::cuda
