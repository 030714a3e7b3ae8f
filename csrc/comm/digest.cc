#include "rlinf/comm/digest.h"

#include <cstring>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

using Wide = unsigned __int128;

// 64-bit odd constants without structure: the fractional parts of the golden ratio, and of square roots of primes.
constexpr uint64_t kIndexStep = 0x9e3779b97f4a7c15;  // golden ratio
constexpr uint64_t kSpread = 0xbb67ae8584caa73b;     // sqrt(3)
constexpr uint64_t kValueOffset = 0x3c6ef372fe94f82b;  // sqrt(5): an element of zero bits counts, too

// Pseudo-random odd number of the flat index.
inline Wide position_factor(uint64_t index) {
  uint64_t state = (index + 1) * kIndexStep;
  state ^= state >> 32;
  state *= kSpread;
  state ^= state >> 29;
  const Wide product = static_cast<Wide>(state) * kIndexStep;
  const uint64_t low = static_cast<uint64_t>(product) ^ state;
  const uint64_t high = static_cast<uint64_t>(product >> 64) + state * kSpread;
  return (static_cast<Wide>(high) << 64) | (low | 1);
}

template <typename Word>
Wide digest_row(const std::byte* elements, uint64_t first_index, const DigestAxis& axis) {
  Wide sum = 0;
  uint64_t index = first_index;
  for (int64_t i = 0; i < axis.length; ++i) {
    Word word;
    std::memcpy(&word, elements + i * axis.memory_stride, sizeof(Word));
    sum += position_factor(index) * (static_cast<Wide>(word) + kValueOffset);
    index += static_cast<uint64_t>(axis.index_stride);
  }
  return sum;
}

Wide digest_axes(const std::byte* elements, uint64_t word_bytes, uint64_t first_index, const DigestAxis* axes,
                 size_t num_axes) {
  if (num_axes > 1) {
    Wide sum = 0;
    for (int64_t i = 0; i < axes[0].length; ++i) {
      sum += digest_axes(elements + i * axes[0].memory_stride, word_bytes,
                         first_index + static_cast<uint64_t>(i * axes[0].index_stride), axes + 1, num_axes - 1);
    }
    return sum;
  }
  switch (word_bytes) {
    case 1:
      return digest_row<uint8_t>(elements, first_index, axes[0]);
    case 2:
      return digest_row<uint16_t>(elements, first_index, axes[0]);
    case 4:
      return digest_row<uint32_t>(elements, first_index, axes[0]);
    default:
      return digest_row<uint64_t>(elements, first_index, axes[0]);
  }
}

// Drops axes of length 1 and fuses neighbours that are contiguous in memory and in the flat index.
std::vector<DigestAxis> fuse(const std::vector<DigestAxis>& axes) {
  std::vector<DigestAxis> fused;
  for (const DigestAxis& axis : axes) {
    if (axis.length == 1) {
      continue;
    }
    if (!fused.empty() && fused.back().memory_stride == axis.memory_stride * axis.length &&
        fused.back().index_stride == axis.index_stride * axis.length) {
      fused.back() = DigestAxis{fused.back().length * axis.length, axis.memory_stride, axis.index_stride};
    } else {
      fused.push_back(axis);
    }
  }
  return fused;
}

}  // namespace

Digest digest_box(const std::byte* elements, uint64_t element_bytes, uint64_t first_index,
                  std::vector<DigestAxis> axes) {
  RLINF_CHECK_USER(element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8 ||
                       element_bytes == 16,
                   "elements of ", element_bytes, " bytes have no digest; allowed: 1, 2, 4, 8, 16");
  for (const DigestAxis& axis : axes) {
    if (axis.length == 0) {
      return Digest{};
    }
  }
  uint64_t word_bytes = element_bytes;
  if (element_bytes == 16) {
    word_bytes = 8;
    first_index *= 2;
    for (DigestAxis& axis : axes) {
      axis.index_stride *= 2;
    }
    axes.push_back(DigestAxis{2, 8, 1});
  }
  axes = fuse(axes);
  if (axes.empty()) {
    axes.push_back(DigestAxis{1, 0, 0});
  }
  const Wide sum = digest_axes(elements, word_bytes, first_index, axes.data(), axes.size());
  return Digest{static_cast<uint64_t>(sum), static_cast<uint64_t>(sum >> 64)};
}

}  // namespace rlinf::comm
