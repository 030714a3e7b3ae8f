#include "rlinf/comm/cuda/digested_copy_lowering.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "rlinf/comm/check.h"

namespace rlinf::comm::cuda {

namespace {

constexpr int64_t kVectorBytes = 16;
constexpr int64_t kCastGroup = 8;  // elements
constexpr int64_t kMinUnits = 32;  // of a row: one for each lane; shorter rows are not worth their heads and tails
constexpr int64_t kElementBytes[] = {4, 2, 2, 1, 2, 4, 8, 16};  // by dtype code

struct Axis {
  int64_t length;
  int64_t source_stride;       // bytes
  int64_t destination_stride;  // bytes
  int64_t index_stride;        // elements of the whole tensor
};
using Axes = std::vector<Axis>;

// Where a part of a box begins on its three sides.
struct Start {
  uint64_t source;
  uint64_t destination;
  uint64_t index;

  Start moved(const Axis& axis, int64_t steps) const {
    return {source + static_cast<uint64_t>(steps * axis.source_stride),
            destination + static_cast<uint64_t>(steps * axis.destination_stride),
            index + static_cast<uint64_t>(steps * axis.index_stride)};
  }
};

// Largest destination stride first, without axes of length 1, neighbours that continue each other on all sides fused.
Axes fuse(const DigestedCopy& copy) {
  Axes axes;
  for (size_t i = 0; i < copy.copy.dimensions.size(); ++i) {
    const CopyDimension& dimension = copy.copy.dimensions[i];
    if (dimension.length != 1) {
      axes.push_back({dimension.length, dimension.source_stride, dimension.destination_stride, copy.index_strides[i]});
    }
  }
  std::stable_sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) {
    return std::abs(a.destination_stride) > std::abs(b.destination_stride);
  });
  Axes fused;
  for (const Axis& axis : axes) {
    if (!fused.empty() && fused.back().source_stride == axis.source_stride * axis.length &&
        fused.back().destination_stride == axis.destination_stride * axis.length &&
        fused.back().index_stride == axis.index_stride * axis.length) {
      fused.back() = {fused.back().length * axis.length, axis.source_stride, axis.destination_stride,
                      axis.index_stride};
    } else {
      fused.push_back(axis);
    }
  }
  return fused;
}

class Lowering {
 public:
  Lowering(const DigestedCopy& copy, int64_t max_run_words, DigestedCopyTiles& tiles)
      : copy_(copy),
        max_run_words_(max_run_words),
        tiles_(tiles),
        source_bytes_(kElementBytes[copy.copy.source_dtype]),
        destination_bytes_(kElementBytes[copy.copy.destination_dtype]),
        is_cast_(copy.copy.source_dtype != copy.copy.destination_dtype && copy.copy.source_dtype < 3 &&
                 copy.copy.destination_dtype < 3),
        unit_(is_cast_ ? kCastGroup : kVectorBytes / destination_bytes_),
        per_word_(8 / destination_bytes_) {}

  void box(const Start& start, Axes axes) {
    if (destination_bytes_ > 8 || axes.empty() || !is_run(axes.back())) {
      apart(start, axes);
      return;
    }
    const Axis run = axes.back();
    axes.pop_back();
    Axis rows{1, 0, 0, 0};
    if (!axes.empty()) {
      const auto longest =
          std::max_element(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.length < b.length; });
      if (keeps_alignment(*longest)) {
        rows = *longest;
        axes.erase(longest);
      }
    }
    if (run.length < kMinUnits * unit_) {
      axes.push_back(rows);
      axes.push_back(run);
      apart(start, axes);
      return;
    }
    each(start, axes, 0, [&](const Start& at) { runs(at, rows, run); });
  }

 private:
  bool is_run(const Axis& axis) const {
    return axis.source_stride == source_bytes_ && axis.destination_stride == destination_bytes_ &&
           axis.index_stride == 1;
  }

  bool keeps_alignment(const Axis& axis) const {
    return (axis.source_stride | axis.destination_stride) % kVectorBytes == 0 && axis.index_stride % per_word_ == 0;
  }

  // Elements before the first whole word that is aligned on both sides; -1: there is none.
  int64_t head_of(const Start& start) const {
    for (int64_t head = 0; head < unit_; ++head) {
      const uint64_t bits = (start.source + static_cast<uint64_t>(head * source_bytes_)) |
                            (start.destination + static_cast<uint64_t>(head * destination_bytes_));
      if (bits % kVectorBytes == 0 &&
          (start.index + static_cast<uint64_t>(head)) % static_cast<uint64_t>(per_word_) == 0) {
        return head;
      }
    }
    return -1;
  }

  void runs(const Start& start, const Axis& rows, const Axis& run) {
    const int64_t head = head_of(start);
    if (head < 0) {
      apart(start, {rows, run});
      return;
    }
    const int64_t num_units = (run.length - head) / unit_;
    const int64_t tail = head + num_units * unit_;
    const auto rest = [&](int64_t first, int64_t length) {
      if (length > 0) {
        apart(start.moved(run, first), {rows, {length, run.source_stride, run.destination_stride, run.index_stride}});
      }
    };
    rest(0, head);
    together(start.moved(run, head), rows, num_units);
    rest(tail, run.length - tail);
  }

  void together(const Start& start, const Axis& rows, int64_t num_units) {
    const int64_t max_columns = std::min<int64_t>(num_units, kMaxTileUnits);
    const int64_t max_rows = kMaxTileUnits / max_columns;
    const Axis units{num_units, unit_ * source_bytes_, unit_ * destination_bytes_, unit_};
    for (int64_t row = 0; row < rows.length; row += max_rows) {
      for (int64_t column = 0; column < num_units; column += max_columns) {
        const Start at = start.moved(rows, row).moved(units, column);
        DigestedCopyTile tile{};
        tile.copy.source = at.source;
        tile.copy.destination = at.destination;
        tile.copy.source_row_stride = rows.source_stride;
        tile.copy.destination_row_stride = rows.destination_stride;
        tile.copy.source_unit_stride = units.source_stride;
        tile.copy.destination_unit_stride = units.destination_stride;
        tile.copy.num_columns = static_cast<uint32_t>(std::min(max_columns, num_units - column));
        tile.copy.num_rows = static_cast<uint32_t>(std::min(max_rows, rows.length - row));
        tile.copy.reciprocal = reciprocal_of(tile.copy.num_columns);
        tile.copy.unit_log2 = is_cast_ ? 3 : 4;
        tile.copy.source_type = is_cast_ ? copy_.copy.source_dtype : 0;
        tile.copy.destination_type = is_cast_ ? copy_.copy.destination_dtype : 0;
        tile.first_word = at.index / static_cast<uint64_t>(per_word_);
        tile.row_words = static_cast<uint64_t>(rows.index_stride / per_word_);
        tile.piece = copy_.piece;
        while ((int64_t{1} << tile.element_log2) < destination_bytes_) {
          ++tile.element_log2;
        }
        tiles_.together.push_back(tile);
      }
    }
  }

  // A copy, and then a digest of what it wrote.
  void apart(const Start& start, const Axes& axes) {
    StridedCopy copy{start.source, start.destination, copy_.copy.source_dtype, copy_.copy.destination_dtype, {}};
    std::vector<DigestAxis> digested;
    for (const Axis& axis : axes) {
      copy.dimensions.push_back({axis.length, axis.source_stride, axis.destination_stride});
      digested.push_back({axis.length, axis.destination_stride, axis.index_stride});
    }
    lower_copy(copy, tiles_.copies);
    lower_digest(start.destination, static_cast<uint64_t>(destination_bytes_), start.index, std::move(digested),
                 copy_.piece, max_run_words_, tiles_.digests);
  }

  template <typename Visit>
  void each(const Start& start, const Axes& axes, size_t depth, const Visit& visit) {
    if (depth == axes.size()) {
      visit(start);
      return;
    }
    for (int64_t i = 0; i < axes[depth].length; ++i) {
      each(start.moved(axes[depth], i), axes, depth + 1, visit);
    }
  }

  const DigestedCopy& copy_;
  int64_t max_run_words_;
  DigestedCopyTiles& tiles_;
  int64_t source_bytes_;
  int64_t destination_bytes_;
  bool is_cast_;
  int64_t unit_;  // elements
  int64_t per_word_;
};

}  // namespace

void lower_digested_copy(const DigestedCopy& copy, int64_t max_run_words, DigestedCopyTiles& tiles) {
  RLINF_CHECK_INTERNAL(copy.index_strides.size() == copy.copy.dimensions.size(), "");
  if (!has_elements(copy.copy)) {
    return;
  }
  Lowering(copy, max_run_words, tiles).box({copy.copy.source, copy.copy.destination, copy.first_index}, fuse(copy));
}

void run_digested_copies_on_cpu(const DigestedCopyTiles& tiles, Digest* sums, uint64_t num_sums) {
  for (const DigestedCopyTile& tile : tiles.together) {
    RLINF_CHECK_INTERNAL(tile.piece < num_sums, "piece ", tile.piece);
    Digest& sum = sums[tile.piece];
    Wide wide = (static_cast<Wide>(sum.high) << 64) | sum.low;
    for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      wide += copy_and_digest_lane(tile, lane);
    }
    sum = Digest{static_cast<uint64_t>(wide), static_cast<uint64_t>(wide >> 64)};
  }
  run_tiles_on_cpu(tiles.copies.data(), tiles.copies.size());
  digest_tiles_on_cpu(tiles.digests.data(), tiles.digests.size(), sums, num_sums);
}

}  // namespace rlinf::comm::cuda
