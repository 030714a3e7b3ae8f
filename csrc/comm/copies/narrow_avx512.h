// float32 to narrower types, a vector at a time.
#pragma once

#include <immintrin.h>

#include "rlinf/comm/data_type.h"

// gcc 12 takes the intrinsics' own "undefined" vectors for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#define RLINF_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

namespace rlinf::comm {

// Integer rounding to nearest even. VCVTNE2PS2BF16 would flush denormals to zero.
template <DataType kTo>
RLINF_AVX512 inline __m256i narrowed(__m512i wide) {
  const __m512 value = _mm512_castsi512_ps(wide);
  if constexpr (kTo == DataType::kFloat16) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(wide, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(rounded);
  }
}

}  // namespace rlinf::comm
