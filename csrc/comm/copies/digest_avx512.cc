// Eight words of a digest at a time: factors by 64-bit arithmetic, products in digits of base 2^52. What is also copied
// is stored from the register that is digested, so that the multiplications run while the memory is waited for.
#include "rlinf/comm/digest.h"

#if defined(__x86_64__)
#include "narrow_avx512.h"

#define RLINF_AVX512_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512ifma,avx512vbmi2")))

namespace rlinf::comm {

namespace {

constexpr uint64_t kIndexStep = 0x9e3779b97f4a7c15;
constexpr uint64_t kSpread = 0xbb67ae8584caa73b;

RLINF_AVX512_WIDE inline __m512i constant(uint64_t value) {
  return _mm512_set1_epi64(static_cast<long long>(value));  // NOLINT: the intrinsic's type
}

// Digits of base 2^52 of the factors K; the multiply-add looks at the lower 52 bits of its operands only, so the upper
// bits may be anything.
struct Factors {
  __m512i digit0;
  __m512i digit1;
  __m512i digit2;
};

// seed: (word index + 1) * kIndexStep.
RLINF_AVX512_WIDE inline Factors factors_from(__m512i seed) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i step = constant(kIndexStep);
  __m512i state = _mm512_xor_si512(seed, _mm512_srli_epi64(seed, 32));
  state = _mm512_mullo_epi64(state, constant(kSpread));
  state = _mm512_xor_si512(state, _mm512_srli_epi64(state, 29));
  const __m512i upper = _mm512_srli_epi64(state, 12);
  return Factors{_mm512_or_si512(_mm512_add_epi64(state, state), _mm512_set1_epi64(1)),
                 _mm512_madd52hi_epu64(zero, upper, step), _mm512_madd52lo_epu64(zero, upper, step)};
}

// Sums of K * (word + ones), each multiply-add into one of its own: none waits for another's result.
struct Sums {
  __m512i digit0;
  __m512i digit1[3];
  __m512i digit2[4];

  RLINF_AVX512_WIDE inline void add(const Factors& k, __m512i word, __m512i ones) {
    const __m512i low = _mm512_add_epi64(word, ones);
    const __mmask8 carries = _mm512_cmplt_epu64_mask(low, ones);
    const __m512i high_bits = _mm512_srli_epi64(low, 52);
    const __m512i high = _mm512_mask_add_epi64(high_bits, carries, high_bits, _mm512_set1_epi64(1 << 12));
    digit0 = _mm512_madd52lo_epu64(digit0, k.digit0, low);
    digit1[0] = _mm512_madd52hi_epu64(digit1[0], k.digit0, low);
    digit1[1] = _mm512_madd52lo_epu64(digit1[1], k.digit1, low);
    digit1[2] = _mm512_madd52lo_epu64(digit1[2], k.digit0, high);
    digit2[0] = _mm512_madd52hi_epu64(digit2[0], k.digit1, low);
    digit2[1] = _mm512_madd52hi_epu64(digit2[1], k.digit0, high);
    digit2[2] = _mm512_madd52lo_epu64(digit2[2], k.digit1, high);
    digit2[3] = _mm512_madd52lo_epu64(digit2[3], k.digit2, low);
  }
};

// 64 bytes to write, as bytes that stand in the source or as the bfloat16 of 32 float32.
template <bool kCasts>
RLINF_AVX512_WIDE inline __m512i load_words(const std::byte* src) {
  if constexpr (kCasts) {
    const __m256i first = narrowed<DataType::kBfloat16>(_mm512_loadu_si512(src));
    const __m256i second = narrowed<DataType::kBfloat16>(_mm512_loadu_si512(src + 64));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  } else {
    return _mm512_loadu_si512(src);
  }
}

// A line written past the caches goes as two halves, as in row_kernels_avx2.cc.
template <bool kStreams>
RLINF_AVX512_WIDE inline void store_words(std::byte* dst, __m512i words) {
  if constexpr (kStreams) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), _mm512_castsi512_si256(words));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst) + 1, _mm512_extracti64x4_epi64(words, 1));
  } else {
    _mm512_storeu_si512(dst, words);
  }
}

// The sums of lanes in registers, and the factors' seeds.
struct Walk {
  Sums sums;
  __m512i seed;

  RLINF_AVX512_WIDE Walk(const DigestLanes& lanes, uint64_t word_index) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    seed = _mm512_add_epi64(constant((word_index + 1) * kIndexStep), _mm512_mullo_epi64(lane, constant(kIndexStep)));
    sums = Sums{_mm512_load_si512(lanes.digits[0]),
                {_mm512_load_si512(lanes.digits[1]), zero, zero},
                {_mm512_load_si512(lanes.digits[2]), zero, zero, zero}};
  }

  RLINF_AVX512_WIDE void store_to(DigestLanes& lanes, int64_t num_steps) const {
    const __m512i* one = sums.digit1;
    const __m512i* two = sums.digit2;
    _mm512_store_si512(lanes.digits[0], sums.digit0);
    _mm512_store_si512(lanes.digits[1], _mm512_add_epi64(one[0], _mm512_add_epi64(one[1], one[2])));
    _mm512_store_si512(lanes.digits[2],
                       _mm512_add_epi64(_mm512_add_epi64(two[0], two[1]), _mm512_add_epi64(two[2], two[3])));
    lanes.num_steps += static_cast<int>(num_steps);
  }
};

template <bool kCasts, bool kStreams>
RLINF_AVX512_WIDE void copy_words(DigestLanes& lanes, std::byte* dst, const std::byte* src, uint64_t word_index,
                                  int64_t num_steps, uint64_t ones_of_elements) {
  Walk walk(lanes, word_index);
  const __m512i ones = constant(ones_of_elements);
  const __m512i stride = constant(8 * kIndexStep);
  for (int64_t step = 0; step < num_steps; ++step, dst += 64, src += kCasts ? 128 : 64) {
    const __m512i words = load_words<kCasts>(src);
    store_words<kStreams>(dst, words);
    walk.sums.add(factors_from(walk.seed), words, ones);
    walk.seed = _mm512_add_epi64(walk.seed, stride);
  }
  walk.store_to(lanes, num_steps);
}

}  // namespace

RLINF_AVX512_WIDE void add_words_avx512(DigestLanes& lanes, const std::byte* words, uint64_t word_index,
                                        int64_t num_words, uint64_t ones_of_elements) {
  Walk walk(lanes, word_index);
  const __m512i ones = constant(ones_of_elements);
  const __m512i stride = constant(8 * kIndexStep);
  int64_t left = num_words;
  for (; left >= 8; left -= 8, words += 64) {
    walk.sums.add(factors_from(walk.seed), _mm512_loadu_si512(words), ones);
    walk.seed = _mm512_add_epi64(walk.seed, stride);
  }
  if (left > 0) {
    const auto mask = static_cast<__mmask8>((1U << left) - 1);
    Factors k = factors_from(walk.seed);
    k.digit0 = _mm512_maskz_mov_epi64(mask, k.digit0);
    k.digit1 = _mm512_maskz_mov_epi64(mask, k.digit1);
    k.digit2 = _mm512_maskz_mov_epi64(mask, k.digit2);
    walk.sums.add(k, _mm512_maskz_loadu_epi64(mask, words), ones);
  }
  walk.store_to(lanes, (num_words + 7) / 8);
}

void copy_words_avx512(DigestLanes& lanes, std::byte* dst, const std::byte* src, uint64_t word_index,
                       int64_t num_steps, uint64_t ones, bool casts, bool streams) {
  const auto copy = casts ? (streams ? &copy_words<true, true> : &copy_words<true, false>)
                          : (streams ? &copy_words<false, true> : &copy_words<false, false>);
  copy(lanes, dst, src, word_index, num_steps, ones);
}

}  // namespace rlinf::comm
#endif
