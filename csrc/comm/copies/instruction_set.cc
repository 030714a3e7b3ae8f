#include "rlinf/comm/data_type.h"

namespace rlinf::comm {

namespace {

#if defined(__x86_64__)
InstructionSet detect() {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (!has_avx2) {
    return InstructionSet::kScalar;
  }
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
}
#else
InstructionSet detect() {
  return InstructionSet::kScalar;
}
#endif

}  // namespace

InstructionSet best_instruction_set() {
  static const InstructionSet best = detect();
  return best;
}

bool has_wide_multiply() {
#if defined(__x86_64__)
  static const bool has = best_instruction_set() == InstructionSet::kAvx512 && __builtin_cpu_supports("avx512ifma") &&
                          __builtin_cpu_supports("avx512vbmi2");
  return has;
#else
  return false;
#endif
}

}  // namespace rlinf::comm
