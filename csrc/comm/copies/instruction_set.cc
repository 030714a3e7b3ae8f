#include "rlinf/comm/data_type.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace rlinf::comm {

namespace {

#if defined(__x86_64__)
// Clang's __builtin_cpu_supports does not know the word.
bool has_f16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

InstructionSet detect() {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
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
