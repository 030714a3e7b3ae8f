// One element from one floating-point format to another, on bit patterns. The definition that the vector kernels are
// tested against.
//
// Rounds to nearest even and keeps denormals. A NaN becomes 0x7fc0 in bfloat16 (c10's scalar conversion; torch itself
// gives 0x7fc0 or 0xffff, depending on whether the tensor is contiguous); in float16 it keeps its sign and the upper
// bits of its payload and becomes quiet, which is what the processor's own instruction does.
#pragma once

#include <cstdint>

#include "rlinf/comm/data_type.h"

namespace rlinf::comm {

constexpr uint32_t kInfinityBits = 0x7f800000;

inline uint16_t bfloat16_from_float32(uint32_t bits) {
  if ((bits & 0x7fffffff) > kInfinityBits) {
    return 0x7fc0;
  }
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint32_t float32_from_bfloat16(uint16_t bits) {
  return static_cast<uint32_t>(bits) << 16;
}

inline uint32_t float32_from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) {
    return sign | kInfinityBits | mantissa << 13 | (mantissa != 0 ? 0x400000 : 0);
  }
  if (exponent != 0) {
    return sign | (exponent + 112) << 23 | mantissa << 13;
  }
  if (mantissa == 0) {
    return sign;
  }
  const int shift = __builtin_clz(mantissa) - 21;  // brings the leading one to bit 10, the implicit one
  return sign | static_cast<uint32_t>(113 - shift) << 23 | ((mantissa << shift) & 0x3ff) << 13;
}

inline uint16_t float16_from_float32(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kInfinityBits) {
    return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  }
  if (magnitude >= 0x47800000) {  // 65536
    return static_cast<uint16_t>(sign | 0x7c00);
  }
  if (magnitude >=
      0x38800000) {  // 2^-14, the smallest normal float16; a carry out of the mantissa is the next exponent
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
  }
  const uint32_t shift = 126 - (magnitude >> 23);
  if (shift > 24) {
    return static_cast<uint16_t>(sign);  // below half of the smallest denormal
  }
  const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
  const uint32_t quotient = mantissa >> shift;
  const uint32_t rest = mantissa & ((uint32_t{1} << shift) - 1);
  const uint32_t half = uint32_t{1} << (shift - 1);
  return static_cast<uint16_t>(sign | (quotient + (rest > half || (rest == half && (quotient & 1) != 0))));
}

// The unsigned integer that holds the bits of one element.
template <DataType kType>
struct BitsOf {
  using type = uint16_t;
};
template <>
struct BitsOf<DataType::kFloat32> {
  using type = uint32_t;
};

template <DataType kFrom, DataType kTo>
typename BitsOf<kTo>::type convert_element(typename BitsOf<kFrom>::type bits) {
  static_assert(is_castable(kFrom) && is_castable(kTo) && kFrom != kTo, "casts are among the three float types");
  uint32_t wide = 0;
  if constexpr (kFrom == DataType::kFloat32) {
    wide = bits;
  } else if constexpr (kFrom == DataType::kBfloat16) {
    wide = float32_from_bfloat16(bits);
  } else {
    wide = float32_from_float16(bits);
  }
  if constexpr (kTo == DataType::kFloat32) {
    return wide;
  } else if constexpr (kTo == DataType::kBfloat16) {
    return bfloat16_from_float32(wide);
  } else {
    return float16_from_float32(wide);
  }
}

}  // namespace rlinf::comm
