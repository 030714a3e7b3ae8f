// The inner part of a program: rows of one step.
#include <algorithm>
#include <array>

#include "rlinf/comm/copy_program.h"
#include "rlinf/comm/row_kernels.h"

namespace rlinf::comm {

namespace {

// Elements that are digested and then copied: they stay in the first-level cache in between.
constexpr int64_t kChunkElements = 2048;
constexpr int64_t kLineBytes = 64;

// Steps through the rows of a step: byte offsets in source and destination, flat index.
class RowWalk {
 public:
  RowWalk(const CopyStep& step, int64_t first_row) : loops_(step.loops) {
    src = step.src_offset;
    dst = step.dst_offset;
    index = step.first_index;
    for (size_t i = loops_.size(); i-- > 0;) {
      at_[i] = first_row % loops_[i].length;
      first_row /= loops_[i].length;
      move(loops_[i], at_[i]);
    }
  }

  // Rows up to the end of the innermost loop, which differ by its strides.
  int64_t num_in_line() const { return loops_.empty() ? 1 : loops_.back().length - at_[loops_.size() - 1]; }

  void advance(int64_t num_rows) {  // at most num_in_line()
    for (size_t i = loops_.size(); i-- > 0;) {
      at_[i] += num_rows;
      move(loops_[i], num_rows);
      if (at_[i] < loops_[i].length) {
        return;
      }
      at_[i] = 0;
      move(loops_[i], -loops_[i].length);
      num_rows = 1;
    }
  }

  int64_t src;
  int64_t dst;
  int64_t index;

 private:
  void move(const CopyLoop& loop, int64_t num_steps) {
    src += num_steps * loop.src_stride;
    dst += num_steps * loop.dst_stride;
    index += num_steps * loop.index_stride;
  }

  const std::vector<CopyLoop>& loops_;
  std::array<int64_t, kMaxCopyDims + 1> at_{};
};

void copy_rows(const CopyStep& step, const CopyPart& part, const PartContext& context, bool may_stream) {
  const RowKernel kernel =
      find_row_kernel(context.instructions, step.src_dtype, step.dst_dtype, step.is_strided(), may_stream);
  const CopyLoop row_step = step.loops.empty() ? CopyLoop{1, 0, 0, 0} : step.loops.back();
  RowWalk walk(step, part.first_row);
  for (int64_t left = part.num_rows; left > 0;) {
    const int64_t num_rows = std::min(left, walk.num_in_line());
    kernel(Rows{context.dst + walk.dst + part.first_column * step.row.dst_stride,
                context.src + walk.src + part.first_column * step.row.src_stride, num_rows, row_step.dst_stride,
                row_step.src_stride, part.num_columns, step.row.dst_stride, step.row.src_stride});
    walk.advance(num_rows);
    left -= num_rows;
  }
}

// Digests rows, and copies them on the way: line by line from the register where rows are dense on both sides, else in
// chunks that stay in the cache.
class DigestingCopy {
 public:
  DigestingCopy(const CopyStep& step, const PartContext& context, bool may_stream)
      : row_(step.row),
        src_bytes_(size_of(step.src_dtype)),
        dst_bytes_(size_of(step.dst_dtype)),
        has_dst_(step.dst_buffer != kNone),
        is_src_dense_(row_.length == 1 || row_.src_stride == src_bytes_),
        is_in_place_(is_src_dense_ && step.src_dtype == step.dst_dtype),
        may_stream_(may_stream),
        adder_(dst_bytes_, context.instructions) {
    const bool is_dst_dense = row_.length == 1 || row_.dst_stride == dst_bytes_;
    casts_ = step.src_dtype == DataType::kFloat32 && step.dst_dtype == DataType::kBfloat16;
    has_lines_ = adder_.can_copy() && has_dst_ && is_dst_dense && is_src_dense_ && (is_in_place_ || casts_) &&
                 row_.index_stride == 1;
    gather_ = find_row_kernel(context.instructions, step.src_dtype, step.dst_dtype, !is_src_dense_, false);
    scatter_ = find_row_kernel(context.instructions, step.dst_dtype, step.dst_dtype, !is_dst_dense, may_stream);
  }

  void add(std::byte* dst, const std::byte* src, uint64_t index, int64_t num_elements) {
    if (!has_lines_) {
      add_chunks(dst, src, index, num_elements);
      return;
    }
    // Lines begin where a word of the tensor does and, to be written past the caches, where one of the memory does.
    const int64_t num_per_word = 8 / dst_bytes_;
    const auto gap_bytes = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kLineBytes - 1));
    const int64_t to_line = gap_bytes / dst_bytes_;
    const auto to_word = static_cast<int64_t>(-index & static_cast<uint64_t>(num_per_word - 1));
    const bool streams = may_stream_ && gap_bytes % dst_bytes_ == 0 && to_line % num_per_word == to_word;
    const int64_t head = std::min(num_elements, streams ? to_line : to_word);
    const int64_t num_lines = (num_elements - head) * dst_bytes_ / kLineBytes;
    const int64_t tail = head + num_lines * (kLineBytes / dst_bytes_);
    add_chunks(dst, src, index, head);
    adder_.copy_lines(dst + head * dst_bytes_, src + head * src_bytes_, index + static_cast<uint64_t>(head), num_lines,
                      casts_, streams);
    add_chunks(dst + tail * dst_bytes_, src + tail * src_bytes_, index + static_cast<uint64_t>(tail),
               num_elements - tail);
  }

  DigestSum sum() { return adder_.sum(); }

 private:
  void add_chunks(std::byte* dst, const std::byte* src, uint64_t index, int64_t num_elements) {
    // What is only read, and where it lies, needs no cutting up.
    const int64_t chunk = is_in_place_ && !has_dst_ ? num_elements : kChunkElements;
    for (int64_t done = 0; done < num_elements; done += chunk) {
      const int64_t length = std::min(chunk, num_elements - done);
      const std::byte* values = src + done * row_.src_stride;
      if (!is_in_place_) {
        gather_(Rows{scratch_, values, 1, 0, 0, length, dst_bytes_, row_.src_stride});
        values = scratch_;
      }
      const uint64_t first = index + static_cast<uint64_t>(done * row_.index_stride);
      if (row_.index_stride == 1 || row_.length == 1) {
        adder_.add_run(values, first, length);
      } else {
        adder_.add_strided(values, dst_bytes_, first, row_.index_stride, length);
      }
      if (has_dst_) {
        scatter_(Rows{dst + done * row_.dst_stride, values, 1, 0, 0, length, row_.dst_stride, dst_bytes_});
      }
    }
  }

  const CopyLoop& row_;
  int64_t src_bytes_;
  int64_t dst_bytes_;
  bool has_dst_;
  bool is_src_dense_;
  bool is_in_place_;
  bool may_stream_;
  bool casts_;
  bool has_lines_;
  DigestAdder adder_;
  RowKernel gather_;
  RowKernel scatter_;
  alignas(64) std::byte scratch_[kChunkElements * 8];
};

DigestSum digest_rows(const CopyStep& step, const CopyPart& part, const PartContext& context, bool may_stream) {
  DigestingCopy copy(step, context, may_stream);
  RowWalk walk(step, part.first_row);
  for (int64_t row = 0; row < part.num_rows; ++row) {
    const auto index = static_cast<uint64_t>(walk.index + part.first_column * step.row.index_stride);
    copy.add(context.dst + walk.dst + part.first_column * step.row.dst_stride,
             context.src + walk.src + part.first_column * step.row.src_stride, index, part.num_columns);
    walk.advance(1);
  }
  return copy.sum();
}

}  // namespace

DigestSum run_part(const CopyStep& step, const CopyPart& part, const PartContext& context) {
  const bool may_stream = context.may_stream && part.num_columns * size_of(step.dst_dtype) >= kStreamingRowBytes;
  if (context.wants_digest && step.digest_slot != kNone) {
    return digest_rows(step, part, context, may_stream);
  }
  if (step.dst_buffer != kNone) {
    copy_rows(step, part, context, may_stream);
  }
  return 0;
}

}  // namespace rlinf::comm
