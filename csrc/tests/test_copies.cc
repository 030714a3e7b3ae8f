// What Python cannot reach of copies and digests: the scalar casts bit by bit, the pool's bounds, the lanes' flush, and
// how steps are cut into parts.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "rlinf/comm/check.h"
#include "rlinf/comm/copy_program.h"
#include "rlinf/comm/float_convert.h"
#include "rlinf/comm/memory_copy.h"
#include "rlinf/comm/row_kernels.h"
#include "rlinf/comm/thread_pool.h"

using namespace rlinf::comm;

namespace {

void expect(bool condition, const std::string& what) {
  if (!condition) {
    throw std::runtime_error(what);
  }
}

// The value of a float16, from its fields.
double float16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

void float16_goes_to_float32_and_back() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const uint32_t wide = float32_from_float16(half);
    const bool is_special = (bits & 0x7c00) == 0x7c00;
    if (!is_special) {
      float value;
      std::memcpy(&value, &wide, sizeof(value));
      expect(static_cast<double>(value) == float16_value(half), join_text("value of float16 ", bits));
    }
    const bool is_nan = is_special && (bits & 0x3ff) != 0;
    expect(float16_from_float32(wide) == (is_nan ? bits | 0x200 : bits), join_text("float16 ", bits, " comes back"));
  }
}

void float32_rounds_to_the_nearest_float16() {
  uint32_t state = 1;
  for (int i = 0; i < 300000; ++i) {
    state = state * 1664525 + 1013904223;
    const uint32_t bits = 0x33000000 + state % (0x47800000 - 0x33000000);  // 2^-25 to 65536
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    const uint16_t found = float16_from_float32(bits);
    if (found == 0x7c00) {
      expect(value >= 65520, "infinity begins halfway after the largest number");
      continue;
    }
    const double distance = std::abs(float16_value(found) - static_cast<double>(value));
    const double below = found == 0 ? HUGE_VAL : std::abs(float16_value(found - 1) - static_cast<double>(value));
    const double above =
        found + 1 == 0x7c00 ? 65536 - static_cast<double>(value) : std::abs(float16_value(found + 1) - value);
    expect(distance <= below && distance <= above, join_text("nearest to ", bits));
    expect((distance < below && distance < above) || (found & 1) == 0, join_text("ties to even at ", bits));
  }
}

void every_task_runs_once_within_the_bound() {
  for (const int num_threads : {1, 2, 5}) {
    std::vector<std::atomic<int>> counts(1000);
    std::atomic<int> num_inside{0};
    std::atomic<int> most_inside{0};
    run_tasks(1000, num_threads, [&](int64_t i) {
      const int now = num_inside.fetch_add(1) + 1;
      int most = most_inside.load();
      while (now > most && !most_inside.compare_exchange_weak(most, now)) {
      }
      std::this_thread::yield();
      counts[i].fetch_add(1);
      num_inside.fetch_sub(1);
    });
    for (const auto& count : counts) {
      expect(count.load() == 1, "each task once");
    }
    expect(most_inside.load() <= num_threads, join_text(most_inside.load(), " threads, bound ", num_threads));
  }
  run_tasks(0, 4, [](int64_t) { throw std::runtime_error("there is no task"); });
}

void callers_at_once_do_not_wait_for_each_other() {
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        run_tasks(7, 3, [&](int64_t i) { total.fetch_add(i); });
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  expect(total.load() == 6 * 200 * 21, "all tasks of all callers");
  expect(num_pool_threads() <= 4, "calls share the pool's threads");
}

void lanes_are_flushed_before_they_overflow() {
  // All ones at every place: the largest digits there are, for longer than the lanes last.
  const std::vector<uint64_t> words(8 * kMaxDigestSteps * 3 + 5, ~uint64_t{0});
  const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
  DigestSum expected = 0;
  for (size_t i = 0; i < words.size(); ++i) {
    expected += position_factor(i) * (static_cast<DigestSum>(words[i]) + 1);
  }
  for (const InstructionSet set : {InstructionSet::kScalar, best_instruction_set()}) {
    DigestAdder whole(8, set);
    whole.add_run(bytes, 0, static_cast<int64_t>(words.size()));
    expect(whole.sum() == expected, "one run");
    DigestAdder pieces(8, set);
    for (size_t at = 0; at < words.size(); at += 3) {
      pieces.add_run(bytes + 8 * at, at, static_cast<int64_t>(std::min<size_t>(3, words.size() - at)));
    }
    expect(pieces.sum() == expected, "many runs");
  }
}

CopyTable rows_table(int64_t num_rows, int64_t num_columns, int64_t pitch) {
  CopyTable table;
  table.num_copies = 1;
  table.num_dims = 2;
  table.lengths = {num_rows, num_columns};
  table.src_buffer = table.dst_buffer = {0};
  table.src_offset = table.dst_offset = {0};
  table.src_dtype = table.dst_dtype = {static_cast<uint8_t>(DataType::kBytes2)};
  table.src_strides = {2 * pitch, 2};
  table.dst_strides = {2 * num_columns, 2};
  return table;
}

void short_runs_become_wide_elements() {
  const CopyStep step = lower(rows_table(100, 4, 10)).at(0);
  expect(step.src_dtype == DataType::kBytes8 && step.num_rows == 1 && step.row.length == 100, "8-byte elements");
  expect(step.is_strided() && step.row.src_stride == 20 && step.row.dst_stride == 8, "strides between them");
  expect(lower(rows_table(100, 5, 10)).at(0).src_dtype == DataType::kBytes2, "10 bytes are no element");
}

void a_program_covers_everything_however_it_is_cut() {
  struct Shape {
    int64_t num_rows, num_columns;
  };
  for (const Shape shape : {Shape{3, 2000001}, Shape{1, 5000000}, Shape{70000, 33}, Shape{2, 1048576}}) {
    const int64_t pitch = shape.num_columns + 3;
    std::vector<uint16_t> src(static_cast<size_t>(shape.num_rows * pitch));
    for (size_t i = 0; i < src.size(); ++i) {
      src[i] = static_cast<uint16_t>(i * 40503 + 7);
    }
    std::vector<uint16_t> dst(static_cast<size_t>(shape.num_rows * shape.num_columns), 0);
    const CopyProgram program(rows_table(shape.num_rows, shape.num_columns, pitch));
    expect(program.num_tasks() > 3, "several tasks");
    program.run({reinterpret_cast<uintptr_t>(src.data())}, {reinterpret_cast<uintptr_t>(dst.data())}, 3, nullptr,
                best_instruction_set());
    for (int64_t row = 0; row < shape.num_rows; ++row) {
      expect(std::memcmp(&dst[row * shape.num_columns], &src[row * pitch], 2 * shape.num_columns) == 0,
             join_text("row ", row, " of ", shape.num_rows));
    }
  }
}

void large_plain_copies_are_exact() {
  std::vector<unsigned char> src((5 << 20) + 99);
  for (size_t i = 0; i < src.size(); ++i) {
    src[i] = static_cast<unsigned char>(i * 31 + i / 251);
  }
  for (size_t i = 0; i < 9; ++i) {
    const size_t shift = std::array<size_t, 3>{0, 1, 63}[i % 3];
    std::vector<unsigned char> dst(src.size() + 128, 0xa5);
    copy_bytes(dst.data() + shift, src.data(), src.size(), static_cast<Stores>(i / 3));
    expect(std::memcmp(dst.data() + shift, src.data(), src.size()) == 0, "the bytes");
    expect(dst[shift + src.size()] == 0xa5 && (shift == 0 || dst[shift - 1] == 0xa5), "nothing around them");
  }
  copy_bytes(nullptr, nullptr, 0);
}

void the_faster_stores_stay() {
  for (const bool streaming_is_slow : {true, false}) {
    StoreChoice choice;
    int num_runs = 0;
    for (; choice.answer() == Stores::kMeasured; ++num_runs) {
      const StoreChoice::Run run(choice, Stores::kMeasured, 100);
      if (run.is_streaming() == streaming_is_slow) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    }
    expect(num_runs == 8, join_text(num_runs, " runs instead of 4 of each kind"));
    const StoreChoice::Run run(choice, Stores::kMeasured, 100);
    expect(run.is_streaming() != streaming_is_slow, "the slower stores were chosen");
    const StoreChoice::Run other(choice, streaming_is_slow ? Stores::kStreaming : Stores::kCached, 100);
    expect(other.is_streaming() == streaming_is_slow, "what the caller says goes before what was measured");
  }
}

void broken_tables_are_refused() {
  CopyTable table = rows_table(2, 2, 2);
  table.src_strides.pop_back();
  try {
    CopyProgram program(table);
  } catch (const UserError& error) {
    expect(std::string(error.what()) == "src_strides has 1 values; the table needs 2", error.what());
    return;
  }
  throw std::runtime_error("a short column was accepted");
}

}  // namespace

int main() {
  float16_goes_to_float32_and_back();
  float32_rounds_to_the_nearest_float16();
  every_task_runs_once_within_the_bound();
  callers_at_once_do_not_wait_for_each_other();
  lanes_are_flushed_before_they_overflow();
  short_runs_become_wide_elements();
  a_program_covers_everything_however_it_is_cut();
  large_plain_copies_are_exact();
  the_faster_stores_stay();
  broken_tables_are_refused();
  std::cout << "copies: ok\n";
  return EXIT_SUCCESS;
}
