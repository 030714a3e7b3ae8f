// Eight words of a digest at a time: factors by 64-bit arithmetic, products in digits of base 2^52.
#include "rlinf/comm/digest.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#define RLINF_AVX512_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512ifma,avx512vbmi2")))

namespace rlinf::comm {

namespace {

constexpr uint64_t kIndexStep = 0x9e3779b97f4a7c15;
constexpr uint64_t kSpread = 0xbb67ae8584caa73b;

RLINF_AVX512_WIDE inline __m512i constant(uint64_t value) {
  return _mm512_set1_epi64(static_cast<long long>(value));  // NOLINT: the intrinsic's type
}

// Digits of base 2^52 of the factors K; the multiply-add looks at the lower 52 bits of its operands only, so the upper
// bits of `digit0` and `digit1` may be anything.
struct Factors {
  __m512i digit0;
  __m512i digit1;
  __m512i digit2;
};

// seed: (word index + 1) * kIndexStep.
RLINF_AVX512_WIDE inline Factors factors_from(__m512i seed) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i step = constant(kIndexStep);
  const __m512i step_high = constant(kIndexStep >> 52);
  __m512i state = _mm512_xor_si512(seed, _mm512_srli_epi64(seed, 32));
  state = _mm512_mullo_epi64(state, constant(kSpread));
  state = _mm512_xor_si512(state, _mm512_srli_epi64(state, 29));
  // The upper half of state * kIndexStep, from digits: (a + b 2^52)(c + d 2^52), whose digit of weight 2^52 counts from
  // its bit 12 on, and that of weight 2^104 from bit 40.
  const __m512i state_high = _mm512_srli_epi64(state, 52);
  __m512i middle = _mm512_madd52hi_epu64(zero, state, step);
  middle = _mm512_madd52lo_epu64(middle, state, step_high);
  middle = _mm512_madd52lo_epu64(middle, state_high, step);
  __m512i top = _mm512_madd52hi_epu64(zero, state, step_high);
  top = _mm512_madd52hi_epu64(top, state_high, step);
  top = _mm512_madd52lo_epu64(top, state_high, step_high);
  const __m512i upper = _mm512_add_epi64(_mm512_srli_epi64(middle, 12), _mm512_slli_epi64(top, 40));
  const __m512i lower = _mm512_mullo_epi64(state, step);
  const __m512i low = _mm512_or_si512(_mm512_xor_si512(lower, state), _mm512_set1_epi64(1));
  const __m512i high = _mm512_add_epi64(upper, _mm512_mullo_epi64(state, constant(kSpread)));
  return Factors{low, _mm512_shldi_epi64(high, low, 12), _mm512_srli_epi64(high, 40)};
}

struct Sums {
  __m512i digits[3];
};

// Adds K * (word + ones). Each step's digits are summed from zero and then added: chains of multiply-adds through the
// sums themselves would be the longest dependency of the loop.
RLINF_AVX512_WIDE inline void add_step(Sums& sums, const Factors& k, __m512i word, __m512i ones) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i low = _mm512_add_epi64(word, ones);
  const __mmask8 carries = _mm512_cmplt_epu64_mask(low, ones);
  const __m512i high_bits = _mm512_srli_epi64(low, 52);
  const __m512i high = _mm512_mask_add_epi64(high_bits, carries, high_bits, _mm512_set1_epi64(1 << 12));
  __m512i middle = _mm512_madd52hi_epu64(zero, k.digit0, low);
  middle = _mm512_madd52lo_epu64(middle, k.digit1, low);
  middle = _mm512_madd52lo_epu64(middle, k.digit0, high);
  __m512i top = _mm512_madd52hi_epu64(zero, k.digit1, low);
  top = _mm512_madd52hi_epu64(top, k.digit0, high);
  top = _mm512_madd52lo_epu64(top, k.digit1, high);
  top = _mm512_madd52lo_epu64(top, k.digit2, low);
  sums.digits[0] = _mm512_madd52lo_epu64(sums.digits[0], k.digit0, low);
  sums.digits[1] = _mm512_add_epi64(sums.digits[1], middle);
  sums.digits[2] = _mm512_add_epi64(sums.digits[2], top);
}

}  // namespace

RLINF_AVX512_WIDE void add_words_avx512(DigestLanes& lanes, const std::byte* words, uint64_t word_index,
                                        int64_t num_words, uint64_t ones_of_elements) {
  Sums sums;
  for (int digit = 0; digit < 3; ++digit) {
    sums.digits[digit] = _mm512_load_si512(lanes.digits[digit]);
  }
  const __m512i ones = constant(ones_of_elements);
  const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  __m512i seed =
      _mm512_add_epi64(constant((word_index + 1) * kIndexStep), _mm512_mullo_epi64(lane, constant(kIndexStep)));
  const __m512i stride = constant(8 * kIndexStep);
  int64_t left = num_words;
  for (; left >= 8; left -= 8, words += 64) {
    add_step(sums, factors_from(seed), _mm512_loadu_si512(words), ones);
    seed = _mm512_add_epi64(seed, stride);
  }
  if (left > 0) {
    const auto mask = static_cast<__mmask8>((1U << left) - 1);
    Factors k = factors_from(seed);
    k.digit0 = _mm512_maskz_mov_epi64(mask, k.digit0);
    k.digit1 = _mm512_maskz_mov_epi64(mask, k.digit1);
    k.digit2 = _mm512_maskz_mov_epi64(mask, k.digit2);
    add_step(sums, k, _mm512_maskz_loadu_epi64(mask, words), ones);
  }
  for (int digit = 0; digit < 3; ++digit) {
    _mm512_store_si512(lanes.digits[digit], sums.digits[digit]);
  }
  lanes.num_steps += static_cast<int>((num_words + 7) / 8);
}

}  // namespace rlinf::comm
#endif
