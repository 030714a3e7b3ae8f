#include "rlinf/comm/memory_copy.h"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace rlinf::comm {

namespace {

#if defined(__x86_64__)
// SSE2 is part of x86-64, and one core already saturates its share of the memory bus with 16-byte streaming stores.
void copy_streaming(std::byte* destination, const std::byte* source, uint64_t num_bytes) {
  const uint64_t to_line = (64 - reinterpret_cast<uintptr_t>(destination) % 64) % 64;
  std::memcpy(destination, source, to_line);
  destination += to_line;
  source += to_line;
  num_bytes -= to_line;
  const uint64_t num_lines = num_bytes / 64;
  for (uint64_t i = 0; i < num_lines; ++i) {
    const auto* from = reinterpret_cast<const __m128i*>(source + i * 64);
    auto* to = reinterpret_cast<__m128i*>(destination + i * 64);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(destination + num_lines * 64, source + num_lines * 64, num_bytes - num_lines * 64);
  _mm_sfence();  // streaming stores are weakly ordered; the commit that follows must not overtake them
}
#endif

}  // namespace

void copy_bytes(void* destination, const void* source, uint64_t num_bytes) {
  if (num_bytes == 0) {
    return;  // the pointers of an empty buffer may be null
  }
#if defined(__x86_64__)
  if (num_bytes >= kStreamingCopyBytes) {
    copy_streaming(static_cast<std::byte*>(destination), static_cast<const std::byte*>(source), num_bytes);
    return;
  }
#endif
  std::memcpy(destination, source, num_bytes);
}

}  // namespace rlinf::comm
