// Element types of a copy, and which instructions it may use.
#pragma once

#include <cstdint>

namespace rlinf::comm {

// The codes that copy tables carry. Casts exist among the first three; the others are bytes of unknown meaning.
enum class DataType : uint8_t { kFloat32, kBfloat16, kFloat16, kBytes1, kBytes2, kBytes4, kBytes8, kBytes16 };
constexpr uint8_t kNumDataTypes = 8;

constexpr int64_t size_of(DataType type) {
  constexpr int64_t kSizes[kNumDataTypes] = {4, 2, 2, 1, 2, 4, 8, 16};
  return kSizes[static_cast<uint8_t>(type)];
}

constexpr bool is_castable(DataType type) {
  return type <= DataType::kFloat16;
}

// In ascending order: a machine that has one also has those before it.
enum class InstructionSet : uint8_t { kScalar, kAvx2, kAvx512 };

// The best that this machine has; detected once.
InstructionSet best_instruction_set();

// Whether this machine also has the 52-bit multiply-add (IFMA, VBMI2) that the AVX-512 digest uses.
bool has_wide_multiply();

}  // namespace rlinf::comm
