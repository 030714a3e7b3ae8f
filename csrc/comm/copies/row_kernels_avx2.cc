// Rows with AVX2 and F16C: the casts in vectors of 8, and copies past the caches in lines of two vectors.
#include <cstring>

#include "rlinf/comm/float_convert.h"
#include "rlinf/comm/row_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define RLINF_AVX2 __attribute__((target("avx2,f16c")))

namespace rlinf::comm {

namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kNumLanes = 8;

template <DataType kFrom>
RLINF_AVX2 inline __m256i load_wide(const std::byte* src) {
  if constexpr (kFrom == DataType::kFloat32) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
  } else {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
    if constexpr (kFrom == DataType::kBfloat16) {
      return _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16);
    } else {
      return _mm256_castps_si256(_mm256_cvtph_ps(narrow));
    }
  }
}

template <DataType kTo>
RLINF_AVX2 inline __m128i narrowed(__m256i wide) {
  const __m256 value = _mm256_castsi256_ps(wide);
  if constexpr (kTo == DataType::kFloat16) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(wide, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
    const __m256i packed = _mm256_packus_epi32(rounded, rounded);  // within each half
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
}

template <DataType kTo, bool kStreaming>
RLINF_AVX2 inline void store_full(std::byte* dst, __m256i wide) {
  if constexpr (kTo == DataType::kFloat32) {
    auto* to = reinterpret_cast<__m256i*>(dst);
    kStreaming ? _mm256_stream_si256(to, wide) : _mm256_storeu_si256(to, wide);
  } else {
    auto* to = reinterpret_cast<__m128i*>(dst);
    kStreaming ? _mm_stream_si128(to, narrowed<kTo>(wide)) : _mm_storeu_si128(to, narrowed<kTo>(wide));
  }
}

template <DataType kFrom, DataType kTo>
RLINF_AVX2 inline void cast_part(std::byte* dst, const std::byte* src, int64_t length) {
  for (int64_t i = 0; i < length; ++i) {
    typename BitsOf<kFrom>::type from;
    std::memcpy(&from, src + i * size_of(kFrom), sizeof(from));
    const auto to = convert_element<kFrom, kTo>(from);
    std::memcpy(dst + i * size_of(kTo), &to, sizeof(to));
  }
}

template <DataType kFrom, DataType kTo, bool kStreaming>
RLINF_AVX2 inline void cast_run(std::byte* dst, const std::byte* src, int64_t length) {
  constexpr int64_t kStep = 4 * kNumLanes;  // a whole line at the destination
  if constexpr (kStreaming) {
    const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kLineBytes - 1)) / size_of(kTo);
    const bool can_align = reinterpret_cast<uintptr_t>(dst) % size_of(kTo) == 0;
    if (!can_align || length < head + kStep) {
      cast_run<kFrom, kTo, false>(dst, src, length);
      return;
    }
    cast_part<kFrom, kTo>(dst, src, head);
    dst += head * size_of(kTo);
    src += head * size_of(kFrom);
    length -= head;
  }
  for (; length >= kStep; length -= kStep) {
    for (int64_t i = 0; i < kStep; i += kNumLanes) {
      store_full<kTo, kStreaming>(dst + i * size_of(kTo), load_wide<kFrom>(src + i * size_of(kFrom)));
    }
    dst += kStep * size_of(kTo);
    src += kStep * size_of(kFrom);
  }
  cast_part<kFrom, kTo>(dst, src, length);
}

template <DataType kFrom, DataType kTo, bool kStreaming>
RLINF_AVX2 void cast_rows(const Rows& rows) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    cast_run<kFrom, kTo, kStreaming>(rows.dst + row * rows.dst_row_stride, rows.src + row * rows.src_row_stride,
                                     rows.length);
  }
}

RLINF_AVX2 inline void stream_run(std::byte* dst, const std::byte* src, int64_t num_bytes) {
  const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (kLineBytes - 1));
  if (num_bytes < head + kLineBytes) {
    std::memcpy(dst, src, static_cast<size_t>(num_bytes));
    return;
  }
  if (head != 0) {
    std::memcpy(dst, src, static_cast<size_t>(head));
  }
  int64_t at = head;
  for (; at + kLineBytes <= num_bytes; at += kLineBytes) {
    const auto* from = reinterpret_cast<const __m256i*>(src + at);
    auto* to = reinterpret_cast<__m256i*>(dst + at);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
  }
  if (at < num_bytes) {
    std::memcpy(dst + at, src + at, static_cast<size_t>(num_bytes - at));
  }
}

template <int64_t kBytes>
RLINF_AVX2 void stream_rows(const Rows& rows) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    stream_run(rows.dst + row * rows.dst_row_stride, rows.src + row * rows.src_row_stride, rows.length * kBytes);
  }
}

}  // namespace

RowKernel find_avx2_kernel(DataType src, DataType dst, bool is_streaming) {
#define RLINF_MAKE(from, to) is_streaming ? &cast_rows<from, to, true> : &cast_rows<from, to, false>
  RLINF_DISPATCH_CAST(src, dst, RLINF_MAKE);
#undef RLINF_MAKE
  if (src != dst || !is_streaming) {
    return nullptr;
  }
  switch (size_of(src)) {
    case 1:
      return &stream_rows<1>;
    case 2:
      return &stream_rows<2>;
    case 4:
      return &stream_rows<4>;
    case 8:
      return &stream_rows<8>;
    default:
      return &stream_rows<16>;
  }
}

}  // namespace rlinf::comm
#endif
