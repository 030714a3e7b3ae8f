#include "rlinf/comm/copy_program.h"

#include <algorithm>

#include "rlinf/comm/check.h"
#include "rlinf/comm/row_kernels.h"
#include "rlinf/comm/thread_pool.h"

namespace rlinf::comm {

namespace {

// As many as the sizes say, or as the copies name; set for those that a step touches.
std::vector<bool> find_used(const std::vector<CopyStep>& steps, const std::vector<int32_t>& column,
                            const std::vector<int64_t>& sizes, int32_t CopyStep::* buffer) {
  const int32_t highest = column.empty() ? -1 : *std::max_element(column.begin(), column.end());
  std::vector<bool> is_used(sizes.empty() ? static_cast<size_t>(highest + 1) : sizes.size());
  for (const CopyStep& step : steps) {
    if (step.*buffer != kNone) {
      is_used[static_cast<size_t>(step.*buffer)] = true;
    }
  }
  return is_used;
}

void check_pointers(const char* side, const std::vector<uint64_t>& pointers, const std::vector<bool>& is_used) {
  RLINF_CHECK_USER(pointers.size() == is_used.size(), pointers.size(), " ", side, " pointers for a program with ",
                   is_used.size(), " ", side, " buffers; pass one for each");
  for (size_t i = 0; i < pointers.size(); ++i) {
    RLINF_CHECK_USER(pointers[i] != 0 || !is_used[i], side, " pointer ", i,
                     " is null, but the program uses its buffer");
  }
}

}  // namespace

CopyProgram::CopyProgram(const CopyTable& table) {
  check_table(table);
  steps_ = lower(table);
  is_src_used_ = find_used(steps_, table.src_buffer, table.src_bytes, &CopyStep::src_buffer);
  is_dst_used_ = find_used(steps_, table.dst_buffer, table.dst_bytes, &CopyStep::dst_buffer);
  num_digests_ = table.num_digests;
  cut();
}

void CopyProgram::cut() {
  int64_t room = 0;  // left in the task
  for (int64_t i = 0; i < num_steps(); ++i) {
    const CopyStep& step = steps_[i];
    const int64_t row_bytes = step.row_bytes();
    const int64_t element_bytes = row_bytes / step.row.length;
    num_rows_ += step.num_rows;
    num_dst_bytes_ += step.num_rows * step.row.length * size_of(step.dst_dtype);
    // A long row is cut by itself, at multiples of a cache line on both sides.
    const int64_t max_columns = row_bytes < 2 * kTaskBytes ? step.row.length : kTaskBytes / element_bytes;
    for (int64_t row = 0; row < step.num_rows;) {
      int64_t num_rows = 1;
      for (int64_t column = 0; column < step.row.length; column += max_columns) {
        if (room < std::min(row_bytes, kTaskBytes / 2)) {
          tasks_.push_back(static_cast<int64_t>(parts_.size()));
          room = kTaskBytes;
        }
        const int64_t num_columns = std::min(max_columns, step.row.length - column);
        if (num_columns == step.row.length) {
          num_rows = std::min(step.num_rows - row, std::max<int64_t>(room / row_bytes, 1));
        }
        parts_.push_back({i, row, num_rows, column, num_columns});
        room -= num_rows * num_columns * element_bytes;
      }
      row += num_rows;
    }
  }
  tasks_.push_back(static_cast<int64_t>(parts_.size()));
}

void CopyProgram::run(const std::vector<uint64_t>& src_pointers, const std::vector<uint64_t>& dst_pointers,
                      int num_threads, Digest* digests, InstructionSet instructions, Stores stores) const {
  check_pointers("src", src_pointers, is_src_used_);
  check_pointers("dst", dst_pointers, is_dst_used_);
  RLINF_CHECK_USER(instructions <= best_instruction_set(), "this machine lacks the instruction set ",
                   static_cast<int>(instructions), "; its best is ", static_cast<int>(best_instruction_set()));
  std::vector<DigestSum> sums(digests != nullptr ? parts_.size() : 0);
  // A smaller program writes through the caches.
  const StoreChoice::Run run(choices_[digests != nullptr],
                             num_dst_bytes_ < kStreamingProgramBytes ? Stores::kCached : stores,
                             static_cast<uint64_t>(num_dst_bytes_));
  const bool may_stream = run.is_streaming();
  run_tasks(num_tasks(), num_threads, [&](int64_t task) {
    for (int64_t i = tasks_[task]; i < tasks_[task + 1]; ++i) {
      const CopyStep& step = steps_[parts_[i].step];
      const auto* src = reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(src_pointers[step.src_buffer]));
      auto* dst = step.dst_buffer == kNone
                      ? nullptr
                      : reinterpret_cast<std::byte*>(static_cast<uintptr_t>(dst_pointers[step.dst_buffer]));
      const DigestSum sum = run_part(step, parts_[i], {src, dst, instructions, may_stream, digests != nullptr});
      if (digests != nullptr) {
        sums[i] = sum;
      }
    }
    if (may_stream) {
      streaming_fence();  // whoever learns that the task is done must find its bytes
    }
  });
  if (digests == nullptr) {
    return;
  }
  std::vector<DigestSum> totals(static_cast<size_t>(num_digests_));
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (steps_[parts_[i].step].digest_slot != kNone) {
      totals[steps_[parts_[i].step].digest_slot] += sums[i];
    }
  }
  for (size_t i = 0; i < totals.size(); ++i) {
    digests[i] = {static_cast<uint64_t>(totals[i]), static_cast<uint64_t>(totals[i] >> 64)};
  }
}

}  // namespace rlinf::comm
