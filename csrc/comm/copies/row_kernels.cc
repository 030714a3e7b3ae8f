// The choice among the kernels, and those that need no vector instructions beyond the processor's base set.
#include "rlinf/comm/row_kernels.h"

#include <cstring>

#include "rlinf/comm/float_convert.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace rlinf::comm {

namespace {

template <typename To, typename From, typename Convert>
inline void convert_one(std::byte* dst, const std::byte* src, Convert convert) {
  From from;
  std::memcpy(&from, src, sizeof(From));
  const To to = convert(from);
  std::memcpy(dst, &to, sizeof(To));
}

template <DataType kFrom, DataType kTo, bool kStrided>
void cast_rows(const Rows& rows) {
  using From = typename BitsOf<kFrom>::type;
  using To = typename BitsOf<kTo>::type;
  const int64_t dst_stride = kStrided ? rows.dst_stride : int64_t{sizeof(To)};
  const int64_t src_stride = kStrided ? rows.src_stride : int64_t{sizeof(From)};
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    std::byte* dst = rows.dst + row * rows.dst_row_stride;
    const std::byte* src = rows.src + row * rows.src_row_stride;
    for (int64_t i = 0; i < rows.length; ++i) {
      convert_one<To, From>(dst + i * dst_stride, src + i * src_stride, convert_element<kFrom, kTo>);
    }
  }
}

template <int64_t kBytes>
struct Element {
  std::byte bytes[kBytes];
};

template <int64_t kBytes>
void copy_strided_rows(const Rows& rows) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    std::byte* dst = rows.dst + row * rows.dst_row_stride;
    const std::byte* src = rows.src + row * rows.src_row_stride;
    for (int64_t i = 0; i < rows.length; ++i) {
      Element<kBytes> element;
      std::memcpy(&element, src + i * rows.src_stride, kBytes);
      std::memcpy(dst + i * rows.dst_stride, &element, kBytes);
    }
  }
}

template <int64_t kBytes>
void copy_rows(const Rows& rows) {
  const auto num_bytes = static_cast<size_t>(rows.length * kBytes);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    std::memcpy(rows.dst + row * rows.dst_row_stride, rows.src + row * rows.src_row_stride, num_bytes);
  }
}

#if defined(__x86_64__)
// SSE2 is part of x86-64.
inline void stream_run(std::byte* dst, const std::byte* src, int64_t num_bytes) {
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & 63);
  if (num_bytes < head + 64) {
    std::memcpy(dst, src, static_cast<size_t>(num_bytes));
    return;
  }
  if (head != 0) {
    std::memcpy(dst, src, static_cast<size_t>(head));
  }
  int64_t at = head;
  for (; at + 64 <= num_bytes; at += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  if (at < num_bytes) {
    std::memcpy(dst + at, src + at, static_cast<size_t>(num_bytes - at));
  }
}

template <int64_t kBytes>
void stream_rows(const Rows& rows) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    stream_run(rows.dst + row * rows.dst_row_stride, rows.src + row * rows.src_row_stride, rows.length * kBytes);
  }
}
#else
template <int64_t kBytes>
void stream_rows(const Rows& rows) {
  copy_rows<kBytes>(rows);
}
#endif

}  // namespace

RowKernel find_scalar_kernel(DataType src, DataType dst, bool is_streaming) {
#define RLINF_MAKE(from, to) &cast_rows<from, to, false>
  RLINF_DISPATCH_CAST(src, dst, RLINF_MAKE);
#undef RLINF_MAKE
  if (src != dst) {
    return nullptr;
  }
  switch (size_of(src)) {
    case 1:
      return is_streaming ? &stream_rows<1> : &copy_rows<1>;
    case 2:
      return is_streaming ? &stream_rows<2> : &copy_rows<2>;
    case 4:
      return is_streaming ? &stream_rows<4> : &copy_rows<4>;
    case 8:
      return is_streaming ? &stream_rows<8> : &copy_rows<8>;
    default:
      return is_streaming ? &stream_rows<16> : &copy_rows<16>;
  }
}

RowKernel find_strided_kernel(DataType src, DataType dst) {
#define RLINF_MAKE(from, to) &cast_rows<from, to, true>
  RLINF_DISPATCH_CAST(src, dst, RLINF_MAKE);
#undef RLINF_MAKE
  if (src != dst) {
    return nullptr;
  }
  switch (size_of(src)) {
    case 1:
      return &copy_strided_rows<1>;
    case 2:
      return &copy_strided_rows<2>;
    case 4:
      return &copy_strided_rows<4>;
    case 8:
      return &copy_strided_rows<8>;
    default:
      return &copy_strided_rows<16>;
  }
}

RowKernel find_row_kernel(InstructionSet instructions, DataType src, DataType dst, bool is_strided, bool is_streaming) {
  if (is_strided) {
    return find_strided_kernel(src, dst);
  }
  RowKernel kernel = nullptr;
#if defined(__x86_64__)
  if (instructions == InstructionSet::kAvx512) {
    kernel = find_avx512_kernel(src, dst, is_streaming);
  }
  if (kernel == nullptr && instructions >= InstructionSet::kAvx2) {
    kernel = find_avx2_kernel(src, dst, is_streaming);
  }
#else
  static_cast<void>(instructions);
#endif
  return kernel != nullptr ? kernel : find_scalar_kernel(src, dst, is_streaming);
}

void streaming_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace rlinf::comm
