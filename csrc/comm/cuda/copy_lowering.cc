#include "rlinf/comm/cuda/copy_lowering.h"

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "rlinf/comm/check.h"

namespace rlinf::comm::cuda {

namespace {

constexpr int64_t kPatch = 32;  // rows and columns of a transposed patch: both sides touch whole sectors of 32 lines
constexpr int64_t kLongRow = 1024;  // bytes; rows of this length get their own alignment when that widens the units
constexpr int64_t kVectorBytes = 16;
constexpr int64_t kCastGroup = 8;  // elements

using Dimensions = std::vector<CopyDimension>;

int64_t element_bytes(uint8_t dtype) {
  constexpr int64_t kBytes[] = {4, 2, 2, 1, 2, 4, 8, 16};
  RLINF_CHECK_USER(dtype < 8, "dtype code ", int{dtype}, " is unknown; allowed: 0 to 7");
  return kBytes[dtype];
}

int64_t low_bit(uint64_t value) {
  return static_cast<int64_t>(value & (~value + 1));
}

// The widest unit, up to 16 bytes, that divides all of `bits` or-ed together.
int64_t widest_unit(uint64_t bits) {
  return low_bit(bits | kVectorBytes);
}

uint8_t log2_of(int64_t value) {
  uint8_t result = 0;
  while (value > 1) {
    value >>= 1;
    ++result;
  }
  return result;
}

// Largest destination stride first, without dimensions of length 1, neighbours that continue each other fused.
Dimensions canonical(Dimensions given) {
  std::stable_sort(given.begin(), given.end(), [](const CopyDimension& a, const CopyDimension& b) {
    return std::abs(a.destination_stride) > std::abs(b.destination_stride);
  });
  Dimensions fused;
  for (const CopyDimension& dimension : given) {
    if (dimension.length == 1) {
      continue;
    }
    if (!fused.empty() && fused.back().source_stride == dimension.source_stride * dimension.length &&
        fused.back().destination_stride == dimension.destination_stride * dimension.length) {
      fused.back().length *= dimension.length;
      fused.back().source_stride = dimension.source_stride;
      fused.back().destination_stride = dimension.destination_stride;
    } else {
      fused.push_back(dimension);
    }
  }
  return fused;
}

CopyDimension take(Dimensions& dimensions, size_t index) {
  const CopyDimension taken = dimensions[index];
  dimensions.erase(dimensions.begin() + static_cast<std::ptrdiff_t>(index));
  return taken;
}

CopyDimension take_longest(Dimensions& dimensions) {
  if (dimensions.empty()) {
    return CopyDimension{1, 0, 0};
  }
  const auto longest = std::max_element(dimensions.begin(), dimensions.end(),
                                        [](const auto& a, const auto& b) { return a.length < b.length; });
  return take(dimensions, static_cast<size_t>(longest - dimensions.begin()));
}

uint64_t moved(uint64_t address, int64_t bytes) {
  return address + static_cast<uint64_t>(bytes);
}

// Calls visit(source, destination) for every index of `outer`.
template <typename Visit>
void for_each_index(const Dimensions& outer, size_t depth, uint64_t source, uint64_t destination, const Visit& visit) {
  if (depth == outer.size()) {
    visit(source, destination);
    return;
  }
  for (int64_t i = 0; i < outer[depth].length; ++i) {
    for_each_index(outer, depth + 1, moved(source, i * outer[depth].source_stride),
                   moved(destination, i * outer[depth].destination_stride), visit);
  }
}

// A rectangle of units, of any size; cut into tiles of at most `max_rows` x `max_columns`.
struct Patch {
  CopyDimension rows;
  CopyDimension columns;
  uint8_t unit_log2;
  uint8_t source_type;
  uint8_t destination_type;
};

void cut(const Patch& patch, int64_t max_rows, int64_t max_columns, uint64_t source, uint64_t destination,
         std::vector<CopyTile>& tiles) {
  for (int64_t row = 0; row < patch.rows.length; row += max_rows) {
    for (int64_t column = 0; column < patch.columns.length; column += max_columns) {
      CopyTile tile{};
      tile.source = moved(source, row * patch.rows.source_stride + column * patch.columns.source_stride);
      tile.destination =
          moved(destination, row * patch.rows.destination_stride + column * patch.columns.destination_stride);
      tile.source_row_stride = patch.rows.source_stride;
      tile.destination_row_stride = patch.rows.destination_stride;
      tile.source_unit_stride = patch.columns.source_stride;
      tile.destination_unit_stride = patch.columns.destination_stride;
      tile.num_columns = static_cast<uint32_t>(std::min(max_columns, patch.columns.length - column));
      tile.num_rows = static_cast<uint32_t>(std::min(max_rows, patch.rows.length - row));
      tile.reciprocal = reciprocal_of(tile.num_columns);
      tile.unit_log2 = patch.unit_log2;
      tile.source_type = patch.source_type;
      tile.destination_type = patch.destination_type;
      tiles.push_back(tile);
    }
  }
}

void cut_dense(const Patch& patch, uint64_t source, uint64_t destination, std::vector<CopyTile>& tiles) {
  if (patch.columns.length == 0) {
    return;
  }
  const int64_t max_columns = std::min<int64_t>(patch.columns.length, kMaxTileUnits);
  cut(patch, kMaxTileUnits / max_columns, max_columns, source, destination, tiles);
}

// Rows of `run_bytes` contiguous bytes: a head up to the first whole unit, the body, and the tail.
void lower_runs(int64_t run_bytes, const CopyDimension& rows, uint64_t source, uint64_t destination,
                std::vector<CopyTile>& tiles) {
  uint64_t bits = source - destination;
  if (rows.length > 1) {
    bits |= static_cast<uint64_t>(rows.source_stride | rows.destination_stride);
  }
  const int64_t unit = widest_unit(bits);
  const int64_t head =
      std::min<int64_t>(static_cast<int64_t>(-destination & static_cast<uint64_t>(unit - 1)), run_bytes);
  const int64_t body = (run_bytes - head) / unit * unit;
  const auto part = [&](int64_t start, int64_t num_bytes, int64_t width) {
    if (num_bytes > 0) {
      const Patch patch{rows, {num_bytes / width, width, width}, log2_of(width), 0, 0};
      cut_dense(patch, moved(source, start), moved(destination, start), tiles);
    }
  };
  const auto narrow = [&](int64_t start, int64_t num_bytes) {
    part(start, num_bytes,
         widest_unit(bits | static_cast<uint64_t>(num_bytes) | (destination + static_cast<uint64_t>(start))));
  };
  narrow(0, head);
  part(head, body, unit);
  narrow(head + body, run_bytes - head - body);
}

void lower_plain(Dimensions dimensions, int64_t element, uint64_t source, uint64_t destination,
                 std::vector<CopyTile>& tiles) {
  int64_t run_bytes = element;
  if (!dimensions.empty() && dimensions.back().source_stride == element &&
      dimensions.back().destination_stride == element) {
    run_bytes *= take(dimensions, dimensions.size() - 1).length;
  }
  CopyDimension rows = take_longest(dimensions);
  const int64_t together =
      widest_unit((source - destination) | static_cast<uint64_t>(rows.source_stride | rows.destination_stride));
  if (rows.length > 1 && run_bytes >= kLongRow && together < kVectorBytes) {
    dimensions.push_back(rows);  // each row with its own alignment
    rows = CopyDimension{1, 0, 0};
  }
  for_each_index(dimensions, 0, source, destination,
                 [&](uint64_t from, uint64_t to) { lower_runs(run_bytes, rows, from, to, tiles); });
}

// No dimension is contiguous on both sides: patches whose columns follow the destination and whose rows the source.
void lower_strided(Dimensions dimensions, const Patch& units, uint64_t source, uint64_t destination,
                   std::vector<CopyTile>& tiles) {
  Patch patch = units;
  patch.columns = take(dimensions, dimensions.size() - 1);
  patch.rows = CopyDimension{1, 0, 0};
  if (!dimensions.empty()) {
    const auto closest = std::min_element(dimensions.begin(), dimensions.end(), [](const auto& a, const auto& b) {
      return std::abs(a.source_stride) < std::abs(b.source_stride);
    });
    patch.rows = take(dimensions, static_cast<size_t>(closest - dimensions.begin()));
  }
  const int64_t max_columns = patch.rows.length == 1 ? kPatch * kPatch : std::min(kPatch, patch.columns.length);
  const int64_t max_rows = kPatch * kPatch / max_columns;
  for_each_index(dimensions, 0, source, destination,
                 [&](uint64_t from, uint64_t to) { cut(patch, max_rows, max_columns, from, to, tiles); });
}

struct Cast {
  uint8_t source_type;
  uint8_t destination_type;
  int64_t source_bytes;
  int64_t destination_bytes;
};

// Elements before the first group that is aligned on both sides; -1 when there is none.
int64_t cast_head(const Cast& cast, const CopyDimension& rows, uint64_t source, uint64_t destination) {
  if (rows.length > 1 && ((rows.source_stride | rows.destination_stride) % kVectorBytes) != 0) {
    return -1;
  }
  for (int64_t head = 0; head < kCastGroup; ++head) {
    if ((moved(source, head * cast.source_bytes) | moved(destination, head * cast.destination_bytes)) % kVectorBytes ==
        0) {
      return head;
    }
  }
  return -1;
}

void cast_runs(const Cast& cast, int64_t length, const CopyDimension& rows, uint64_t source, uint64_t destination,
               std::vector<CopyTile>& tiles) {
  const auto part = [&](int64_t start, int64_t num_elements, int64_t group) {
    const Patch patch{rows,
                      {num_elements / group, group * cast.source_bytes, group * cast.destination_bytes},
                      log2_of(group),
                      cast.source_type,
                      cast.destination_type};
    cut_dense(patch, moved(source, start * cast.source_bytes), moved(destination, start * cast.destination_bytes),
              tiles);
  };
  const int64_t head = cast_head(cast, rows, source, destination);
  if (head < 0 || length < head + kCastGroup) {
    part(0, length, 1);
    return;
  }
  const int64_t body = (length - head) / kCastGroup * kCastGroup;
  part(0, head, 1);
  part(head, body, kCastGroup);
  part(head + body, length - head - body, 1);
}

void lower_cast(Dimensions dimensions, const Cast& cast, uint64_t source, uint64_t destination,
                std::vector<CopyTile>& tiles) {
  int64_t length = 1;
  if (!dimensions.empty() && dimensions.back().source_stride == cast.source_bytes &&
      dimensions.back().destination_stride == cast.destination_bytes) {
    length = take(dimensions, dimensions.size() - 1).length;
  }
  CopyDimension rows = take_longest(dimensions);
  if (rows.length > 1 && length * cast.destination_bytes >= kLongRow &&
      cast_head(cast, rows, source, destination) < 0) {
    dimensions.push_back(rows);
    rows = CopyDimension{1, 0, 0};
  }
  for_each_index(dimensions, 0, source, destination,
                 [&](uint64_t from, uint64_t to) { cast_runs(cast, length, rows, from, to, tiles); });
}

bool is_cast(const StridedCopy& copy) {
  return copy.source_dtype != copy.destination_dtype && copy.source_dtype < 3 && copy.destination_dtype < 3;
}

void check_cast_alignment(const StridedCopy& copy, const Dimensions& dimensions, int64_t source_bytes,
                          int64_t destination_bytes) {
  uint64_t source_bits = copy.source;
  uint64_t destination_bits = copy.destination;
  for (const CopyDimension& dimension : dimensions) {
    source_bits |= static_cast<uint64_t>(dimension.source_stride);
    destination_bits |= static_cast<uint64_t>(dimension.destination_stride);
  }
  RLINF_CHECK_USER(source_bits % static_cast<uint64_t>(source_bytes) == 0 &&
                       destination_bits % static_cast<uint64_t>(destination_bytes) == 0,
                   "a cast needs addresses and strides that are multiples of the element (source ", source_bytes,
                   " bytes, destination ", destination_bytes, " bytes)");
}

bool is_dense(const CopyDimension& dimension, int64_t source_bytes, int64_t destination_bytes) {
  return dimension.source_stride == source_bytes && dimension.destination_stride == destination_bytes;
}

// Widest unit in which single elements can be moved: the element itself where both sides align.
int64_t element_unit(const StridedCopy& copy, const Dimensions& dimensions, int64_t element) {
  uint64_t bits = copy.source | copy.destination | static_cast<uint64_t>(element);
  for (const CopyDimension& dimension : dimensions) {
    bits |= static_cast<uint64_t>(dimension.source_stride | dimension.destination_stride);
  }
  return widest_unit(bits);
}

}  // namespace

bool has_elements(const StridedCopy& copy) {
  const int64_t source_bytes = element_bytes(copy.source_dtype);
  const int64_t destination_bytes = element_bytes(copy.destination_dtype);
  RLINF_CHECK_USER(is_cast(copy) || source_bytes == destination_bytes, "dtype codes ", int{copy.source_dtype}, " -> ",
                   int{copy.destination_dtype},
                   " is no cast; casts exist among 0, 1 and 2 (float32, bfloat16, float16)");
  for (const CopyDimension& dimension : copy.dimensions) {
    RLINF_CHECK_USER(dimension.length >= 0, "a length of ", dimension.length, "; allowed: 0 or more");
    RLINF_CHECK_USER(dimension.length <= 1 || dimension.destination_stride != 0,
                     "a destination stride of 0 on a dimension of length ", dimension.length,
                     " writes one place many times");
    if (dimension.length == 0) {
      return false;
    }
  }
  if (is_cast(copy)) {
    check_cast_alignment(copy, canonical(copy.dimensions), source_bytes, destination_bytes);
  }
  return true;
}

void lower_copy(const StridedCopy& copy, std::vector<CopyTile>& tiles) {
  if (!has_elements(copy)) {
    return;
  }
  const int64_t source_bytes = element_bytes(copy.source_dtype);
  const int64_t destination_bytes = element_bytes(copy.destination_dtype);
  const Dimensions dimensions = canonical(copy.dimensions);
  const bool dense = dimensions.empty() || is_dense(dimensions.back(), source_bytes, destination_bytes);
  if (is_cast(copy)) {
    const Cast cast{copy.source_dtype, copy.destination_dtype, source_bytes, destination_bytes};
    if (dense) {
      lower_cast(dimensions, cast, copy.source, copy.destination, tiles);
    } else {
      lower_strided(dimensions, Patch{{}, {}, 0, cast.source_type, cast.destination_type}, copy.source,
                    copy.destination, tiles);
    }
    return;
  }
  const int64_t unit = dense ? source_bytes : element_unit(copy, dimensions, source_bytes);
  if (dense || unit != source_bytes) {  // elements that do not align are short runs of narrower units
    lower_plain(dimensions, source_bytes, copy.source, copy.destination, tiles);
  } else {
    lower_strided(dimensions, Patch{{}, {}, log2_of(unit), 0, 0}, copy.source, copy.destination, tiles);
  }
}

void run_tiles_on_cpu(const CopyTile* tiles, uint64_t num_tiles) {
  for (uint64_t i = 0; i < num_tiles; ++i) {
    for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      run_tile(tiles[i], lane);
    }
  }
}

}  // namespace rlinf::comm::cuda
