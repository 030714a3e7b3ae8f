// The unit of work of the kernel that copies and digests in one pass, shared by kernel and CPU model. A copy's words
// are digested as they are written, while they are in registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "rlinf/comm/cuda/copy_tile.h"
#include "rlinf/comm/cuda/digest_tile.h"

namespace rlinf::comm::cuda {

// A copy of 16-byte units, or a cast of groups of 8 elements, whose units are whole words of the tensor's flat index.
struct DigestedCopyTile {
  CopyTile copy;
  uint64_t first_word;  // of the flat index in words
  uint64_t row_words;   // from row to row
  uint32_t piece;       // which sum it adds to
  uint8_t element_log2;  // of the destination's bytes, 0 to 3
  uint8_t reserved[3];
};
static_assert(sizeof(DigestedCopyTile) == 88, "the layout that the host uploads");

RLINF_HOST_DEVICE uint64_t word_state(const DigestedCopyTile& tile, uint32_t index, uint32_t words_per_unit) {
  const uint32_t row = divide(index, tile.copy.reciprocal);
  const uint32_t column = index - row * tile.copy.num_columns;
  return (tile.first_word + row * tile.row_words + uint64_t{column} * words_per_unit + 1) * kIndexStep;
}

RLINF_HOST_DEVICE Wide unit_term(uint64_t state, const Unit16& unit, uint64_t ones) {
  return word_term(state, static_cast<uint64_t>(unit.words[1]) << 32 | unit.words[0], ones) +
         word_term(state + kIndexStep, static_cast<uint64_t>(unit.words[3]) << 32 | unit.words[2], ones);
}

// One lane's part of a plain copy: all loads of a step before its stores, and those before the products.
RLINF_HOST_DEVICE Wide copy_and_digest_units(const DigestedCopyTile& tile, uint64_t ones, uint32_t lane) {
  constexpr uint32_t kInFlight = 4;
  const uint32_t num_units = tile.copy.num_columns * tile.copy.num_rows;
  Wide sum = 0;
  uint32_t index = lane;
  for (; index + (kInFlight - 1) * kWarpLanes < num_units; index += kInFlight * kWarpLanes) {
    Unit16 units[kInFlight];
    uint64_t targets[kInFlight];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const UnitPlace place = place_of(tile.copy, index + i * kWarpLanes);
      units[i] = load_unit<Unit16>(place.source);
      targets[i] = place.destination;
    }
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kInFlight; ++i) {
      store_unit(targets[i], units[i]);
    }
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kInFlight; ++i) {
      sum += unit_term(word_state(tile, index + i * kWarpLanes, 2), units[i], ones);
    }
  }
  for (; index < num_units; index += kWarpLanes) {
    const UnitPlace place = place_of(tile.copy, index);
    const Unit16 unit = load_unit<Unit16>(place.source);
    store_unit(place.destination, unit);
    sum += unit_term(word_state(tile, index, 2), unit, ones);
  }
  return sum;
}

// One lane's part of a cast of groups of 8 elements; what is digested is what is written.
template <Float kFrom, Float kTo>
RLINF_HOST_DEVICE Wide cast_and_digest_units(const DigestedCopyTile& tile, uint64_t ones, uint32_t lane) {
  constexpr uint32_t kGroup = 8;
  using Source = ElementGroup<typename BitsOf<kFrom>::Type, kGroup>;
  using Destination = ElementGroup<typename BitsOf<kTo>::Type, kGroup>;
  constexpr uint32_t kWords = sizeof(Destination) / 8;
  const uint32_t num_units = tile.copy.num_columns * tile.copy.num_rows;
  Wide sum = 0;
#ifdef __CUDACC__
#pragma unroll 2
#endif
  for (uint32_t index = lane; index < num_units; index += kWarpLanes) {
    const UnitPlace place = place_of(tile.copy, index);
    const Source source = load_group<Source>(place.source);
    Destination destination;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kGroup; ++i) {
      destination.elements[i] = cast_bits<kFrom, kTo>(source.elements[i]);
    }
    store_group(place.destination, destination);
    uint64_t words[kWords];
    std::memcpy(words, &destination, sizeof(words));
    const uint64_t state = word_state(tile, index, kWords);
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kWords; ++i) {
      sum += word_term(state + i * kIndexStep, words[i], ones);
    }
  }
  return sum;
}

// Everything that lane `lane` of the warp does for a tile; returns its part of the digest.
RLINF_HOST_DEVICE Wide copy_and_digest_lane(const DigestedCopyTile& tile, uint32_t lane) {
  const uint64_t ones = ones_of(tile.element_log2);
  if (tile.copy.source_type == tile.copy.destination_type) {
    return copy_and_digest_units(tile, ones, lane);
  }
  switch (tile.copy.source_type * 3 + tile.copy.destination_type) {
    case 0 * 3 + 1:
      return cast_and_digest_units<Float::k32, Float::kBf16>(tile, ones, lane);
    case 0 * 3 + 2:
      return cast_and_digest_units<Float::k32, Float::k16>(tile, ones, lane);
    case 1 * 3 + 0:
      return cast_and_digest_units<Float::kBf16, Float::k32>(tile, ones, lane);
    case 1 * 3 + 2:
      return cast_and_digest_units<Float::kBf16, Float::k16>(tile, ones, lane);
    case 2 * 3 + 0:
      return cast_and_digest_units<Float::k16, Float::k32>(tile, ones, lane);
    default:
      return cast_and_digest_units<Float::k16, Float::kBf16>(tile, ones, lane);
  }
}

}  // namespace rlinf::comm::cuda
