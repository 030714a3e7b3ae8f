// The unit of work of the batched copy: a two-dimensional piece of a copy that one warp moves. The code that walks a
// tile is here, so that the kernel (batched_copy.cu) and its CPU model (copy_lowering.cc) run the same arithmetic.
#pragma once

#include <cstdint>
#include <cstring>

#include "rlinf/comm/cuda/portable.h"
#include "rlinf/comm/cuda/tile_units.h"

namespace rlinf::comm::cuda {

// 64 bytes, not 48: a transpose needs a stride inside the row on both sides, else each of its rows would be a tile.
struct CopyTile {
  uint64_t source;
  uint64_t destination;
  int64_t source_row_stride;        // bytes
  int64_t destination_row_stride;   // bytes
  int64_t source_unit_stride;       // bytes
  int64_t destination_unit_stride;  // bytes
  uint32_t num_columns;             // units per row
  uint32_t num_rows;
  uint32_t reciprocal;       // floor(2^32 / num_columns) + 1; 0 when num_columns is 1
  uint8_t unit_log2;         // plain copies: log2 of the unit's bytes; casts: log2 of its elements
  uint8_t source_type;       // a Float, for casts
  uint8_t destination_type;  // a Float; equal to source_type for plain copies
  uint8_t reserved;
};
static_assert(sizeof(CopyTile) == 64, "the kernel reads a tile as four 16-byte vectors");

// index * num_columns < 2^32 makes the division by multiplication exact; the lowering keeps both below 2^16.
constexpr uint32_t kMaxTileUnits = 4096;

RLINF_HOST_DEVICE uint32_t reciprocal_of(uint32_t divisor) {
  return divisor <= 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / divisor) + 1;
}

RLINF_HOST_DEVICE uint32_t divide(uint32_t index, uint32_t reciprocal) {
#ifdef __CUDA_ARCH__
  return reciprocal == 0 ? index : __umulhi(index, reciprocal);
#else
  return reciprocal == 0 ? index : static_cast<uint32_t>((static_cast<uint64_t>(index) * reciprocal) >> 32);
#endif
}

struct UnitPlace {
  uint64_t source;
  uint64_t destination;
};

RLINF_HOST_DEVICE UnitPlace place_of(const CopyTile& tile, uint32_t index) {
  const uint32_t row = divide(index, tile.reciprocal);
  const uint32_t column = index - row * tile.num_columns;
  return {tile.source + static_cast<uint64_t>(row * tile.source_row_stride + column * tile.source_unit_stride),
          tile.destination +
              static_cast<uint64_t>(row * tile.destination_row_stride + column * tile.destination_unit_stride)};
}

// One lane's part of a plain copy: kInFlight loads before the first store.
template <typename Unit>
RLINF_HOST_DEVICE void copy_units(const CopyTile& tile, uint32_t lane) {
  constexpr uint32_t kInFlight = 4;
  const uint32_t num_units = tile.num_columns * tile.num_rows;
  uint32_t index = lane;
  for (; index + (kInFlight - 1) * kWarpLanes < num_units; index += kInFlight * kWarpLanes) {
    Unit units[kInFlight];
    uint64_t targets[kInFlight];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const UnitPlace place = place_of(tile, index + i * kWarpLanes);
      units[i] = load_unit<Unit>(place.source);
      targets[i] = place.destination;
    }
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kInFlight; ++i) {
      store_unit(targets[i], units[i]);
    }
  }
  for (; index < num_units; index += kWarpLanes) {
    const UnitPlace place = place_of(tile, index);
    store_unit(place.destination, load_unit<Unit>(place.source));
  }
}

template <typename Element, uint32_t kNum>
struct alignas(sizeof(Element) * kNum < 16 ? sizeof(Element) * kNum : 16) ElementGroup {
  Element elements[kNum];
};

template <typename Group>
RLINF_HOST_DEVICE Group load_group(uint64_t address) {
  Group group;
  if constexpr (sizeof(Group) >= 16) {
    Unit16 parts[sizeof(Group) / 16];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < sizeof(Group) / 16; ++i) {
      parts[i] = load_unit<Unit16>(address + 16 * i);
    }
    std::memcpy(&group, parts, sizeof(Group));
  } else {
    group = load_unit<Group>(address);
  }
  return group;
}

template <typename Group>
RLINF_HOST_DEVICE void store_group(uint64_t address, const Group& group) {
  if constexpr (sizeof(Group) >= 16) {
    Unit16 parts[sizeof(Group) / 16];
    std::memcpy(parts, &group, sizeof(Group));
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < sizeof(Group) / 16; ++i) {
      store_unit(address + 16 * i, parts[i]);
    }
  } else {
    store_unit(address, group);
  }
}

// One lane's part of a cast; a unit is kNum elements.
template <Float kFrom, Float kTo, uint32_t kNum>
RLINF_HOST_DEVICE void cast_units(const CopyTile& tile, uint32_t lane) {
  using Source = ElementGroup<typename BitsOf<kFrom>::Type, kNum>;
  using Destination = ElementGroup<typename BitsOf<kTo>::Type, kNum>;
  const uint32_t num_units = tile.num_columns * tile.num_rows;
#ifdef __CUDACC__
#pragma unroll 2
#endif
  for (uint32_t index = lane; index < num_units; index += kWarpLanes) {
    const UnitPlace place = place_of(tile, index);
    const Source source = load_group<Source>(place.source);
    Destination destination;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (uint32_t i = 0; i < kNum; ++i) {
      destination.elements[i] = cast_bits<kFrom, kTo>(source.elements[i]);
    }
    store_group(place.destination, destination);
  }
}

template <Float kFrom, Float kTo>
RLINF_HOST_DEVICE void cast_tile(const CopyTile& tile, uint32_t lane) {
  if (tile.unit_log2 == 3) {
    cast_units<kFrom, kTo, 8>(tile, lane);
  } else {
    cast_units<kFrom, kTo, 1>(tile, lane);
  }
}

// Everything that lane `lane` of the warp does for a tile.
RLINF_HOST_DEVICE void run_tile(const CopyTile& tile, uint32_t lane) {
  if (tile.source_type == tile.destination_type) {
    switch (tile.unit_log2) {
      case 4:
        return copy_units<Unit16>(tile, lane);
      case 3:
        return copy_units<uint64_t>(tile, lane);
      case 2:
        return copy_units<uint32_t>(tile, lane);
      case 1:
        return copy_units<uint16_t>(tile, lane);
      default:
        return copy_units<uint8_t>(tile, lane);
    }
  }
  switch (tile.source_type * 3 + tile.destination_type) {
    case 0 * 3 + 1:
      return cast_tile<Float::k32, Float::kBf16>(tile, lane);
    case 0 * 3 + 2:
      return cast_tile<Float::k32, Float::k16>(tile, lane);
    case 1 * 3 + 0:
      return cast_tile<Float::kBf16, Float::k32>(tile, lane);
    case 1 * 3 + 2:
      return cast_tile<Float::kBf16, Float::k16>(tile, lane);
    case 2 * 3 + 0:
      return cast_tile<Float::k16, Float::k32>(tile, lane);
    default:
      return cast_tile<Float::k16, Float::kBf16>(tile, lane);
  }
}

}  // namespace rlinf::comm::cuda
