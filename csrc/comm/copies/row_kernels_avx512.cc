// Casts with AVX-512. Each function names the instructions it needs, so the rest of the library runs anywhere. Copies
// stay with AVX2: on Zen 5 a line written past the caches as two vectors of 32 bytes is up to 1.3 times as fast as one
// of 64 (rows of 384 bytes and more), and masked stores at unaligned ends cost short rows half of their speed.
#include "rlinf/comm/float_convert.h"
#include "rlinf/comm/row_kernels.h"

#if defined(__x86_64__)
#include "narrow_avx512.h"

namespace rlinf::comm {

namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kNumLanes = 16;  // elements in flight: a vector of float32

// 16 elements, those in `mask`, as the bits of float32.
template <DataType kFrom>
RLINF_AVX512 inline __m512i load_wide(const std::byte* src, __mmask16 mask) {
  if constexpr (kFrom == DataType::kFloat32) {
    return _mm512_maskz_loadu_epi32(mask, src);
  } else {
    const __m256i narrow = _mm256_maskz_loadu_epi16(mask, src);
    if constexpr (kFrom == DataType::kBfloat16) {
      return _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
    } else {
      return _mm512_castps_si512(_mm512_cvtph_ps(narrow));
    }
  }
}

template <DataType kTo>
RLINF_AVX512 inline void store_masked(std::byte* dst, __m512i wide, __mmask16 mask) {
  if constexpr (kTo == DataType::kFloat32) {
    _mm512_mask_storeu_epi32(dst, mask, wide);
  } else {
    _mm256_mask_storeu_epi16(dst, mask, narrowed<kTo>(wide));
  }
}

template <DataType kTo, bool kStreaming>
RLINF_AVX512 inline void store_full(std::byte* dst, __m512i wide) {
  if constexpr (kTo == DataType::kFloat32) {
    kStreaming ? _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), wide) : _mm512_storeu_si512(dst, wide);
  } else {
    auto* to = reinterpret_cast<__m256i*>(dst);
    kStreaming ? _mm256_stream_si256(to, narrowed<kTo>(wide)) : _mm256_storeu_si256(to, narrowed<kTo>(wide));
  }
}

template <DataType kFrom, DataType kTo>
RLINF_AVX512 inline void cast_part(std::byte* dst, const std::byte* src, int64_t length) {
  while (length > 0) {
    const int64_t step = length < kNumLanes ? length : kNumLanes;
    const auto mask = static_cast<__mmask16>((1U << step) - 1);
    store_masked<kTo>(dst, load_wide<kFrom>(src, mask), mask);
    dst += step * size_of(kTo);
    src += step * size_of(kFrom);
    length -= step;
  }
}

template <DataType kFrom, DataType kTo, bool kStreaming>
RLINF_AVX512 inline void cast_run(std::byte* dst, const std::byte* src, int64_t length) {
  constexpr __mmask16 kAll = 0xffff;
  constexpr int64_t kStep = 2 * kNumLanes;
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
    const __m512i first = load_wide<kFrom>(src, kAll);
    const __m512i second = load_wide<kFrom>(src + kNumLanes * size_of(kFrom), kAll);
    store_full<kTo, kStreaming>(dst, first);
    store_full<kTo, kStreaming>(dst + kNumLanes * size_of(kTo), second);
    dst += kStep * size_of(kTo);
    src += kStep * size_of(kFrom);
  }
  cast_part<kFrom, kTo>(dst, src, length);
}

template <DataType kFrom, DataType kTo, bool kStreaming>
RLINF_AVX512 void cast_rows(const Rows& rows) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    cast_run<kFrom, kTo, kStreaming>(rows.dst + row * rows.dst_row_stride, rows.src + row * rows.src_row_stride,
                                     rows.length);
  }
}

}  // namespace

RowKernel find_avx512_kernel(DataType src, DataType dst, bool is_streaming) {
#define RLINF_MAKE(from, to) is_streaming ? &cast_rows<from, to, true> : &cast_rows<from, to, false>
  RLINF_DISPATCH_CAST(src, dst, RLINF_MAKE);
#undef RLINF_MAKE
  return nullptr;
}

}  // namespace rlinf::comm
#endif
