#include "rlinf/comm/cuda/digest_lowering.h"

#include <algorithm>

#include "rlinf/comm/check.h"

namespace rlinf::comm::cuda {

namespace {

using Axes = std::vector<DigestAxis>;

constexpr int64_t kMinRunWords = 64;  // two loads of 8 bytes for each lane; shorter rows are dealt out together

Axes fuse(const Axes& axes) {
  Axes fused;
  for (const DigestAxis& axis : axes) {
    if (axis.length == 1) {
      continue;
    }
    if (!fused.empty() && fused.back().memory_stride == axis.memory_stride * axis.length &&
        fused.back().index_stride == axis.index_stride * axis.length) {
      fused.back() = DigestAxis{fused.back().length * axis.length, axis.memory_stride, axis.index_stride};
    } else {
      fused.push_back(axis);
    }
  }
  return fused;
}

class Lowering {
 public:
  Lowering(uint8_t element_log2, uint32_t piece, int64_t max_run_words, std::vector<DigestTile>& tiles)
      : element_log2_(element_log2), piece_(piece), max_run_words_(max_run_words), tiles_(tiles) {}

  void box(uint64_t address, uint64_t index, const DigestAxis* axes, size_t num_axes) {
    if (num_axes > 2) {
      for (int64_t i = 0; i < axes[0].length; ++i) {
        box(address + static_cast<uint64_t>(i * axes[0].memory_stride),
            index + static_cast<uint64_t>(i * axes[0].index_stride), axes + 1, num_axes - 1);
      }
      return;
    }
    const DigestAxis one{1, 0, 0};
    const DigestAxis columns = num_axes == 0 ? one : axes[num_axes - 1];
    const DigestAxis rows = num_axes == 2 ? axes[0] : one;
    const int64_t element = int64_t{1} << element_log2_;
    const int64_t per_word = 8 / element;
    const bool rows_keep_place = rows.length == 1 || rows.index_stride % per_word == 0;
    if (columns.index_stride != 1 || columns.memory_stride != element || !rows_keep_place) {
      rectangle(address, index, rows, columns, false);
      return;
    }
    const int64_t head = std::min((per_word - static_cast<int64_t>(index % per_word)) % per_word, columns.length);
    const int64_t words = (columns.length - head) / per_word;
    const int64_t tail = columns.length - head - words * per_word;
    const auto part = [&](int64_t start, int64_t length) {
      rectangle(address + static_cast<uint64_t>(start * element), index + static_cast<uint64_t>(start), rows,
                DigestAxis{length, element, 1}, false);
    };
    part(0, head);
    rectangle(address + static_cast<uint64_t>(head * element), (index + static_cast<uint64_t>(head)) / per_word,
              DigestAxis{rows.length, rows.memory_stride, rows.index_stride / per_word}, DigestAxis{words, 8, 1}, true);
    part(head + words * per_word, tail);
  }

 private:
  void rectangle(uint64_t address, uint64_t index, const DigestAxis& rows, const DigestAxis& columns, bool is_words) {
    if (columns.length == 0) {
      return;
    }
    const uint8_t unit_log2 = is_words ? 3 : element_log2_;
    uint64_t bits = address;
    if (rows.length > 1) {
      bits |= static_cast<uint64_t>(rows.memory_stride);
    }
    if (columns.length > 1) {
      bits |= static_cast<uint64_t>(columns.memory_stride);
    }
    uint8_t load_log2 = unit_log2;
    while (bits % (uint64_t{1} << load_log2) != 0) {
      --load_log2;
    }
    const bool is_runs = is_words && load_log2 == 3 && columns.length >= kMinRunWords;
    const int64_t max_units = is_runs ? max_run_words_ : kMaxTileUnits;
    const int64_t max_columns = std::min(columns.length, max_units);
    const int64_t max_rows = max_units / max_columns;
    for (int64_t row = 0; row < rows.length; row += max_rows) {
      for (int64_t column = 0; column < columns.length; column += max_columns) {
        DigestTile tile{};
        tile.address = address + static_cast<uint64_t>(row * rows.memory_stride + column * columns.memory_stride);
        tile.first_index = index + static_cast<uint64_t>(row * rows.index_stride + column * columns.index_stride);
        tile.row_memory_stride = rows.memory_stride;
        tile.row_index_stride = rows.index_stride;
        tile.unit_memory_stride = columns.memory_stride;
        tile.unit_index_stride = columns.index_stride;
        tile.num_columns = static_cast<uint32_t>(std::min(max_columns, columns.length - column));
        tile.num_rows = static_cast<uint32_t>(std::min(max_rows, rows.length - row));
        tile.reciprocal = is_runs ? 0 : reciprocal_of(tile.num_columns);
        tile.piece = piece_;
        tile.element_log2 = element_log2_;
        tile.load_log2 = load_log2;
        tile.is_words = is_words ? 1 : 0;
        tile.is_runs = is_runs ? 1 : 0;
        tiles_.push_back(tile);
      }
    }
  }

  uint8_t element_log2_;
  uint32_t piece_;
  int64_t max_run_words_;
  std::vector<DigestTile>& tiles_;
};

}  // namespace

void lower_digest(uint64_t address, uint64_t element_bytes, uint64_t first_index, std::vector<DigestAxis> axes,
                  uint32_t piece, int64_t max_run_words, std::vector<DigestTile>& tiles) {
  RLINF_CHECK_USER(
      element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8 || element_bytes == 16,
      "elements of ", element_bytes, " bytes have no digest; allowed: 1, 2, 4, 8, 16");
  for (const DigestAxis& axis : axes) {
    if (axis.length == 0) {
      return;
    }
  }
  if (element_bytes == 16) {  // two words
    element_bytes = 8;
    first_index *= 2;
    for (DigestAxis& axis : axes) {
      axis.index_stride *= 2;
    }
    axes.push_back(DigestAxis{2, 8, 1});
  }
  uint8_t element_log2 = 0;
  while ((uint64_t{1} << element_log2) < element_bytes) {
    ++element_log2;
  }
  axes = fuse(axes);
  Lowering(element_log2, piece, max_run_words, tiles).box(address, first_index, axes.data(), axes.size());
}

int64_t run_words_of(int64_t num_bytes) {
  constexpr int64_t kNumTiles = 16384;  // a few for each warp of a large device
  return std::clamp<int64_t>(num_bytes / 8 / kNumTiles, 1024, 65536);
}

void digest_tiles_on_cpu(const DigestTile* tiles, uint64_t num_tiles, Digest* sums, uint64_t num_sums) {
  for (uint64_t i = 0; i < num_tiles; ++i) {
    RLINF_CHECK_INTERNAL(tiles[i].piece < num_sums, "piece ", tiles[i].piece);
    Digest& sum = sums[tiles[i].piece];
    Wide wide = (static_cast<Wide>(sum.high) << 64) | sum.low;
    for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      wide += digest_lane(tiles[i], lane);
    }
    sum = Digest{static_cast<uint64_t>(wide), static_cast<uint64_t>(wide >> 64)};
  }
}

}  // namespace rlinf::comm::cuda
