// The units that the lanes of a copy move, their loads and stores, and the casts. Shared by kernel and CPU model,
// except for the lines under __CUDA_ARCH__: the loads and stores, and the conversion instructions of the half types.
#pragma once

#include <cstdint>
#include <cstring>

#include "rlinf/comm/cuda/portable.h"

namespace rlinf::comm::cuda {

struct alignas(16) Unit16 {
  uint32_t words[4];
};

template <typename Unit>
RLINF_HOST_DEVICE Unit load_unit(uint64_t address) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Unit) == 16) {
    Unit unit;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.words[0]), "=r"(unit.words[1]), "=r"(unit.words[2]), "=r"(unit.words[3])
                 : "l"(address));
    return unit;
  } else {
    return *reinterpret_cast<const Unit*>(address);
  }
#else
  Unit unit;
  std::memcpy(&unit, reinterpret_cast<const void*>(static_cast<uintptr_t>(address)), sizeof(Unit));
  return unit;
#endif
}

template <typename Unit>
RLINF_HOST_DEVICE void store_unit(uint64_t address, const Unit& unit) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Unit) == 16) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(unit.words[0]),
                 "r"(unit.words[1]), "r"(unit.words[2]), "r"(unit.words[3])
                 : "memory");
  } else {
    *reinterpret_cast<Unit*>(address) = unit;
  }
#else
  std::memcpy(reinterpret_cast<void*>(static_cast<uintptr_t>(address)), &unit, sizeof(Unit));
#endif
}

// Floating-point types as bits; the values are the dtype codes of a copy table.
enum class Float : uint8_t { k32 = 0, kBf16 = 1, k16 = 2 };

template <Float kType>
struct BitsOf {
  using Type = uint16_t;
};
template <>
struct BitsOf<Float::k32> {
  using Type = uint32_t;
};

RLINF_HOST_DEVICE bool is_nan(uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u;
}

// Every NaN becomes the positive quiet NaN without payload, as in the CPU's casts.
RLINF_HOST_DEVICE uint16_t bf16_from_f32(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return is_nan(bits) ? uint16_t{0x7fc0} : static_cast<uint16_t>(rounded);
}

RLINF_HOST_DEVICE uint16_t f16_from_f32(uint32_t bits) {
  if (is_nan(bits)) {
    return 0x7e00;
  }
#ifdef __CUDA_ARCH__
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(__uint_as_float(bits)));
  return half;
#else
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 102) {  // below 2^-25
      return static_cast<uint16_t>(sign);
    }
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126 - exponent;  // 14 to 24
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    return static_cast<uint16_t>(sign | (kept + ((rest > half || (rest == half && (kept & 1u))) ? 1u : 0u)));
  }
  const uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
  return static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13));
#endif
}

RLINF_HOST_DEVICE uint32_t f32_from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) {
    return sign | 0x7f800000u | (mantissa << 13);
  }
  if (exponent != 0) {
    return sign | ((exponent + 112) << 23) | (mantissa << 13);
  }
  if (mantissa == 0) {
    return sign;
  }
  uint32_t biased = 113;
  while ((mantissa & 0x400u) == 0) {
    mantissa <<= 1;
    --biased;
  }
  return sign | (biased << 23) | ((mantissa & 0x3ffu) << 13);
}

template <Float kFrom, Float kTo>
RLINF_HOST_DEVICE typename BitsOf<kTo>::Type cast_bits(typename BitsOf<kFrom>::Type bits) {
  uint32_t single;
  if constexpr (kFrom == Float::k32) {
    single = bits;
  } else if constexpr (kFrom == Float::kBf16) {
    single = static_cast<uint32_t>(bits) << 16;
  } else {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    single = (bits & 0x7fffu) > 0x7c00u ? f32_from_f16(bits) : __float_as_uint(value);
#else
    single = f32_from_f16(bits);
#endif
  }
  if constexpr (kTo == Float::k32) {
    return single;
  } else if constexpr (kTo == Float::kBf16) {
    return bf16_from_f32(single);
  } else {
    return f16_from_f32(single);
  }
}

}  // namespace rlinf::comm::cuda
