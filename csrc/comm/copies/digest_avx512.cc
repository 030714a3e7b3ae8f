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
  __m512i products[3];
  __m512i factors[3];
};

RLINF_AVX512_WIDE inline void add_step(Sums& sums, const Factors& k, __m512i word) {
  const __m512i word_high = _mm512_srli_epi64(word, 52);
  const __m512i one = _mm512_set1_epi64(1);
  sums.products[0] = _mm512_madd52lo_epu64(sums.products[0], k.digit0, word);
  sums.products[1] = _mm512_madd52hi_epu64(sums.products[1], k.digit0, word);
  sums.products[1] = _mm512_madd52lo_epu64(sums.products[1], k.digit1, word);
  sums.products[1] = _mm512_madd52lo_epu64(sums.products[1], k.digit0, word_high);
  sums.products[2] = _mm512_madd52hi_epu64(sums.products[2], k.digit1, word);
  sums.products[2] = _mm512_madd52hi_epu64(sums.products[2], k.digit0, word_high);
  sums.products[2] = _mm512_madd52lo_epu64(sums.products[2], k.digit1, word_high);
  sums.products[2] = _mm512_madd52lo_epu64(sums.products[2], k.digit2, word);
  sums.factors[0] = _mm512_madd52lo_epu64(sums.factors[0], k.digit0, one);
  sums.factors[1] = _mm512_madd52lo_epu64(sums.factors[1], k.digit1, one);
  sums.factors[2] = _mm512_madd52lo_epu64(sums.factors[2], k.digit2, one);
}

}  // namespace

RLINF_AVX512_WIDE void add_words_avx512(DigestLanes& lanes, const std::byte* words, uint64_t word_index,
                                        int64_t num_words) {
  Sums sums;
  for (int digit = 0; digit < 3; ++digit) {
    sums.products[digit] = _mm512_load_si512(lanes.products[digit]);
    sums.factors[digit] = _mm512_load_si512(lanes.factors[digit]);
  }
  const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  __m512i seed =
      _mm512_add_epi64(constant((word_index + 1) * kIndexStep), _mm512_mullo_epi64(lane, constant(kIndexStep)));
  const __m512i stride = constant(8 * kIndexStep);
  int64_t left = num_words;
  for (; left >= 8; left -= 8, words += 64) {
    add_step(sums, factors_from(seed), _mm512_loadu_si512(words));
    seed = _mm512_add_epi64(seed, stride);
  }
  if (left > 0) {
    const auto mask = static_cast<__mmask8>((1U << left) - 1);
    Factors k = factors_from(seed);
    k.digit0 = _mm512_maskz_mov_epi64(mask, k.digit0);
    k.digit1 = _mm512_maskz_mov_epi64(mask, k.digit1);
    k.digit2 = _mm512_maskz_mov_epi64(mask, k.digit2);
    add_step(sums, k, _mm512_maskz_loadu_epi64(mask, words));
  }
  for (int digit = 0; digit < 3; ++digit) {
    _mm512_store_si512(lanes.products[digit], sums.products[digit]);
    _mm512_store_si512(lanes.factors[digit], sums.factors[digit]);
  }
  lanes.num_steps += static_cast<int>((num_words + 7) / 8);
}

}  // namespace rlinf::comm
#endif
