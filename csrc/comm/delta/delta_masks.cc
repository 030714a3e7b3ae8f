#include "delta_masks.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define RLINF_DELTA_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))
#endif

namespace rlinf::comm {

namespace {

template <typename Element>
uint64_t mask_of_few(const std::byte* a, const std::byte* b, size_t count) {
  uint64_t mask = 0;
  for (size_t i = 0; i < count; ++i) {
    mask |= static_cast<uint64_t>(std::memcmp(a + i * sizeof(Element), b + i * sizeof(Element), sizeof(Element)) != 0)
            << i;
  }
  return mask;
}

// 64 elements. Most are equal, which the first loop finds in vectors.
template <typename Element>
uint64_t mask_of_64(const std::byte* a, const std::byte* b) {
  uint64_t differing = 0;
  for (size_t i = 0; i < 8 * sizeof(Element); ++i) {
    uint64_t one, other;
    std::memcpy(&one, a + i * 8, 8);
    std::memcpy(&other, b + i * 8, 8);
    differing |= one ^ other;
  }
  return differing == 0 ? 0 : mask_of_few<Element>(a, b, 64);
}

#if defined(__x86_64__)
template <typename Element>
RLINF_DELTA_AVX512 uint64_t mask_of_64_avx512(const std::byte* a, const std::byte* b) {
  uint64_t mask = 0;
  for (size_t i = 0; i < sizeof(Element); ++i) {
    const __m512i one = _mm512_loadu_si512(a + i * 64);
    const __m512i other = _mm512_loadu_si512(b + i * 64);
    uint64_t part;
    if constexpr (sizeof(Element) == 1) {
      part = _mm512_cmpneq_epi8_mask(one, other);
    } else if constexpr (sizeof(Element) == 2) {
      part = _mm512_cmpneq_epi16_mask(one, other);
    } else if constexpr (sizeof(Element) == 4) {
      part = _mm512_cmpneq_epi32_mask(one, other);
    } else {
      part = _mm512_cmpneq_epi64_mask(one, other);
    }
    mask |= part << (i * (64 / sizeof(Element)));
  }
  return mask;
}

template <typename Element>
RLINF_DELTA_AVX512 size_t changed_avx512(const std::byte* a, const std::byte* b, size_t num_full, uint64_t* masks) {
  size_t found = 0;
  for (size_t word = 0; word < num_full; ++word) {
    const size_t first = word * 64 * sizeof(Element);
    masks[word] = mask_of_64_avx512<Element>(a + first, b + first);
    found += static_cast<size_t>(__builtin_popcountll(masks[word]));
  }
  return found;
}
#endif

}  // namespace

template <typename Element>
size_t changed_elements(const std::byte* a, const std::byte* b, size_t length, uint64_t* masks,
                        InstructionSet instructions) {
  const size_t num_full = length / 64;
  size_t found = 0;
#if defined(__x86_64__)
  const bool is_wide = instructions == InstructionSet::kAvx512;
#else
  const bool is_wide = false;
#endif
  if (is_wide) {
#if defined(__x86_64__)
    found = changed_avx512<Element>(a, b, num_full, masks);
#endif
  } else {
    for (size_t word = 0; word < num_full; ++word) {
      const size_t first = word * 64 * sizeof(Element);
      masks[word] = mask_of_64<Element>(a + first, b + first);
      found += static_cast<size_t>(__builtin_popcountll(masks[word]));
    }
  }
  if (length % 64 != 0) {
    const size_t first = num_full * 64 * sizeof(Element);
    masks[num_full] = mask_of_few<Element>(a + first, b + first, length % 64);
    found += static_cast<size_t>(__builtin_popcountll(masks[num_full]));
  }
  return found;
}

template size_t changed_elements<uint8_t>(const std::byte*, const std::byte*, size_t, uint64_t*, InstructionSet);
template size_t changed_elements<uint16_t>(const std::byte*, const std::byte*, size_t, uint64_t*, InstructionSet);
template size_t changed_elements<uint32_t>(const std::byte*, const std::byte*, size_t, uint64_t*, InstructionSet);
template size_t changed_elements<uint64_t>(const std::byte*, const std::byte*, size_t, uint64_t*, InstructionSet);

}  // namespace rlinf::comm
