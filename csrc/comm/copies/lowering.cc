// From a table to steps: the fewest loops, in the order of the source's addresses.
#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "rlinf/comm/copy_program.h"

namespace rlinf::comm {

namespace {

// Loops of a copy, outermost first, without those of length 1; false when it has no elements.
bool read_loops(const CopyTable& table, int64_t copy, std::vector<CopyLoop>* loops) {
  for (int64_t dim = 0; dim < table.num_dims; ++dim) {
    const int64_t cell = copy * table.num_dims + dim;
    const int64_t length = table.lengths[cell];
    if (length == 0) {
      return false;
    }
    if (length > 1) {
      loops->push_back({length, table.src_strides[cell], table.dst_buffer.empty() ? 0 : table.dst_strides[cell],
                        table.digest_slot.empty() ? 0 : table.index_strides[cell]});
    }
  }
  return true;
}

// Largest steps through the source outermost. A source that is read repeatedly is so for whole passes.
void sort_by_source(std::vector<CopyLoop>* loops) {
  const auto reach = [](const CopyLoop& loop) {
    return std::abs(loop.src_stride != 0 ? loop.src_stride : loop.dst_stride);
  };
  std::stable_sort(loops->begin(), loops->end(),
                   [&](const CopyLoop& a, const CopyLoop& b) { return reach(a) > reach(b); });
}

// Neighbouring loops that are one loop on every side.
void fuse(std::vector<CopyLoop>* loops) {
  std::vector<CopyLoop> fused;
  for (const CopyLoop& loop : *loops) {
    if (!fused.empty() && fused.back().src_stride == loop.src_stride * loop.length &&
        fused.back().dst_stride == loop.dst_stride * loop.length &&
        fused.back().index_stride == loop.index_stride * loop.length) {
      const int64_t length = fused.back().length * loop.length;
      fused.back() = loop;
      fused.back().length = length;
    } else {
      fused.push_back(loop);
    }
  }
  *loops = std::move(fused);
}

bool have_equal_strides(const CopyLoop& a, const CopyLoop& b) {
  return a.src_stride == b.src_stride && a.dst_stride == b.dst_stride && a.index_stride == b.index_stride;
}

// Appends `next` to `step` where it goes on with the outermost loop of `step`. Both have their row in `loops` still.
bool join(CopyStep* step, const CopyStep& next) {
  std::vector<CopyLoop>& loops = step->loops;
  if (std::tie(step->src_buffer, step->dst_buffer, step->digest_slot, step->src_dtype, step->dst_dtype) !=
          std::tie(next.src_buffer, next.dst_buffer, next.digest_slot, next.src_dtype, next.dst_dtype) ||
      loops.size() != next.loops.size() || loops.empty() || !have_equal_strides(loops[0], next.loops[0])) {
    return false;
  }
  for (size_t i = 1; i < loops.size(); ++i) {
    if (loops[i].length != next.loops[i].length || !have_equal_strides(loops[i], next.loops[i])) {
      return false;
    }
  }
  CopyLoop& outer = loops[0];
  if (next.src_offset - step->src_offset != outer.length * outer.src_stride ||
      next.dst_offset - step->dst_offset != outer.length * outer.dst_stride ||
      next.first_index - step->first_index != outer.length * outer.index_stride) {
    return false;
  }
  outer.length += next.loops[0].length;
  return true;
}

// A run of 2, 4, 8 or 16 bytes that stands alone is one element of that size.
void widen_elements(CopyStep* step) {
  if (step->src_dtype != step->dst_dtype || step->digest_slot != kNone || step->loops.size() < 2) {
    return;
  }
  const CopyLoop& run = step->loops.back();
  const int64_t size = size_of(step->src_dtype);
  if (run.src_stride != size || run.dst_stride != size) {
    return;
  }
  for (const DataType wide : {DataType::kBytes2, DataType::kBytes4, DataType::kBytes8, DataType::kBytes16}) {
    if (size_of(wide) == size * run.length) {
      step->src_dtype = step->dst_dtype = wide;
      step->loops.pop_back();
      return;
    }
  }
}

// The digest knows words of up to 8 bytes.
void split_16_byte_elements(CopyStep* step, std::vector<CopyLoop>* loops) {
  if (step->digest_slot == kNone || step->dst_dtype != DataType::kBytes16) {
    return;
  }
  step->src_dtype = step->dst_dtype = DataType::kBytes8;
  step->first_index *= 2;
  for (CopyLoop& loop : *loops) {
    loop.index_stride *= 2;
  }
  loops->push_back({2, 8, step->dst_buffer == kNone ? 0 : 8, 1});
}

// Takes the row out of the loops.
void finish(CopyStep* step) {
  widen_elements(step);
  const bool has_dst = step->dst_buffer != kNone;
  step->row = {1, size_of(step->src_dtype), has_dst ? size_of(step->dst_dtype) : 0, 1};
  if (!step->loops.empty()) {
    step->row = step->loops.back();
    step->loops.pop_back();
  }
  step->num_rows = 1;
  for (const CopyLoop& loop : step->loops) {
    step->num_rows *= loop.length;
  }
}

}  // namespace

std::vector<CopyStep> lower(const CopyTable& table) {
  std::vector<CopyStep> steps;
  for (int64_t copy = 0; copy < table.num_copies; ++copy) {
    CopyStep step{};
    const bool has_dst = !table.dst_buffer.empty();
    const bool has_digest = !table.digest_slot.empty() && table.digest_slot[copy] != kNone;
    if (!has_dst && !has_digest) {
      continue;
    }
    step.src_buffer = table.src_buffer[copy];
    step.dst_buffer = has_dst ? table.dst_buffer[copy] : kNone;
    step.digest_slot = has_digest ? table.digest_slot[copy] : kNone;
    step.src_dtype = static_cast<DataType>(table.src_dtype[copy]);
    step.dst_dtype = static_cast<DataType>(table.dst_dtype[copy]);
    step.src_offset = table.src_offset[copy];
    step.dst_offset = has_dst ? table.dst_offset[copy] : 0;
    step.first_index = has_digest ? table.first_index[copy] : 0;
    if (!read_loops(table, copy, &step.loops)) {
      continue;
    }
    if (!has_digest) {
      for (CopyLoop& loop : step.loops) {
        loop.index_stride = 0;
      }
    }
    split_16_byte_elements(&step, &step.loops);
    sort_by_source(&step.loops);
    fuse(&step.loops);
    steps.push_back(std::move(step));
  }
  std::stable_sort(steps.begin(), steps.end(), [](const CopyStep& a, const CopyStep& b) {
    return std::tie(a.src_buffer, a.src_offset) < std::tie(b.src_buffer, b.src_offset);
  });
  std::vector<CopyStep> joined;
  for (CopyStep& step : steps) {
    if (joined.empty() || !join(&joined.back(), step)) {
      joined.push_back(std::move(step));
    }
  }
  for (CopyStep& step : joined) {
    finish(&step);
  }
  return joined;
}

}  // namespace rlinf::comm
