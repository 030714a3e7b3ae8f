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
  uint8_t is_runs;  // of words, in long rows at multiples of 8 bytes; such a tile may have more than kMaxTileUnits
  uint8_t reserved[4];
};
static_assert(sizeof(DigestTile) == 72, "the layout that the host uploads");

RLINF_HOST_DEVICE uint64_t high_product(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
#endif
}

constexpr uint64_t kIndexStep = 0x9e3779b97f4a7c15;

// K(word_index) of rlinf/comm/digest.h, of the state that begins as (word_index + 1) * kIndexStep: neighbours differ in
// that by an addition.
struct Factor {
  uint64_t low;
  uint64_t high;
};
RLINF_HOST_DEVICE Factor factor_of(uint64_t state) {
  constexpr uint64_t kSpread = 0xbb67ae8584caa73b;
  constexpr uint64_t kDigit = (uint64_t{1} << 52) - 1;
  state ^= state >> 32;
  state *= kSpread;
  state ^= state >> 29;
  // A product of 104 bits: 52 to 103 are the middle digit, which so lie where they belong, and 0 to 23 the upper one.
  const uint64_t upper = state >> 12;
  const uint64_t step = kIndexStep & kDigit;
  const uint64_t low = upper * step;
  return {(low & ~kDigit) | (state << 1 & kDigit) | 1, high_product(upper, step) | low << 40};
}

// The factor of `state` times a word with `ones` added to it, modulo 2^128.
RLINF_HOST_DEVICE Wide word_term(uint64_t state, uint64_t bits, uint64_t ones) {
  const Factor factor = factor_of(state);
  const uint64_t word = bits + ones;
  const uint64_t high = high_product(factor.low, word) + factor.high * word + (word < bits ? factor.low : 0);
  return (static_cast<Wide>(high) << 64) | factor.low * word;
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

template <uint32_t kWords>
RLINF_HOST_DEVICE void load_words(uint64_t address, uint64_t* words) {
  if constexpr (kWords == 2) {
    const Unit16 unit = load_unit<Unit16>(address);
    words[0] = static_cast<uint64_t>(unit.words[1]) << 32 | unit.words[0];
    words[1] = static_cast<uint64_t>(unit.words[3]) << 32 | unit.words[2];
  } else {
    words[0] = load_unit<uint64_t>(address);
  }
}

// One lane's part of neighbouring words, `kWords` in a load: all loads of a step before the first product.
template <uint32_t kWords>
RLINF_HOST_DEVICE Wide digest_run(uint64_t address, uint64_t first_index, uint32_t num_words, uint64_t ones,
                                  uint32_t lane) {
  constexpr uint32_t kInFlight = 4;
  constexpr uint32_t kStride = kWarpLanes * kWords;
  uint32_t at = lane * kWords;
  uint64_t state = (first_index + at + 1) * kIndexStep;
  Wide sum = 0;
  for (; at + (kInFlight - 1) * kStride + kWords <= num_words; at += kInFlight * kStride) {
    uint64_t words[kInFlight][kWords];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kInFlight; ++i) {
      load_words<kWords>(address + 8 * uint64_t{at + i * kStride}, words[i]);
    }
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kInFlight; ++i) {
#ifdef __CUDACC__
#pragma unroll
#endif
      for (uint32_t word = 0; word < kWords; ++word) {
        sum += word_term(state + word * kIndexStep, words[i][word], ones);
      }
      state += kStride * kIndexStep;
    }
  }
  for (; at < num_words; at += kStride, state += kStride * kIndexStep) {
    for (uint32_t word = 0; word < kWords && at + word < num_words; ++word) {
      const uint64_t bits = load_unit<uint64_t>(address + 8 * uint64_t{at + word});
      sum += word_term(state + word * kIndexStep, bits, ones);
    }
  }
  return sum;
}

// The sum of one lane's units of a tile of runs: rows of neighbouring words at multiples of 8 bytes.
RLINF_HOST_DEVICE Wide digest_runs(const DigestTile& tile, uint64_t ones, uint32_t lane) {
  Wide sum = 0;
  for (uint32_t row = 0; row < tile.num_rows; ++row) {
    const uint64_t address = tile.address + static_cast<uint64_t>(row * tile.row_memory_stride);
    const uint64_t index = tile.first_index + static_cast<uint64_t>(row * tile.row_index_stride);
    sum += address % 16 == 0 ? digest_run<2>(address, index, tile.num_columns, ones, lane)
                             : digest_run<1>(address, index, tile.num_columns, ones, lane);
  }
  return sum;
}

// One in the lowest bit of each element of a word.
RLINF_HOST_DEVICE uint64_t ones_of(uint32_t element_log2) {
  return element_log2 == 3   ? 1
         : element_log2 == 2 ? 0x0000000100000001
         : element_log2 == 1 ? 0x0001000100010001
                             : 0x0101010101010101;
}

// The sum of one lane's units of the tile.
RLINF_HOST_DEVICE Wide digest_lane(const DigestTile& tile, uint32_t lane) {
  const uint32_t per_word_log2 = 3 - tile.element_log2;
  const uint64_t ones = ones_of(tile.element_log2);
  if (tile.is_runs) {
    return digest_runs(tile, ones, lane);
  }
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
      sum += word_term((index + 1) * kIndexStep, bits, ones);
    } else {
      const uint32_t place = static_cast<uint32_t>(index) & ((1u << per_word_log2) - 1);
      const Factor factor = factor_of(((index >> per_word_log2) + 1) * kIndexStep);
      sum += ((static_cast<Wide>(factor.high) << 64) | factor.low) *
             ((static_cast<Wide>(bits) + 1) << ((8u << tile.element_log2) * place));
    }
  }
  return sum;
}

}  // namespace rlinf::comm::cuda
