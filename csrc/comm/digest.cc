#include "rlinf/comm/digest.h"

#include <cstring>

#include "rlinf/comm/check.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "digest_run reads words as little-endian"
#endif

namespace rlinf::comm {

namespace {

using Wide = unsigned __int128;

// 64-bit odd constants without structure: the fractional parts of the golden ratio and of the square root of 3.
constexpr uint64_t kIndexStep = 0x9e3779b97f4a7c15;
constexpr uint64_t kSpread = 0xbb67ae8584caa73b;

// K(j): a pseudo-random odd number.
inline Wide position_factor(uint64_t word_index) {
  uint64_t state = (word_index + 1) * kIndexStep;
  state ^= state >> 32;
  state *= kSpread;
  state ^= state >> 29;
  const Wide product = static_cast<Wide>(state) * kIndexStep;
  const uint64_t low = static_cast<uint64_t>(product) ^ state;
  const uint64_t high = static_cast<uint64_t>(product >> 64) + state * kSpread;
  return (static_cast<Wide>(high) << 64) | (low | 1);
}

// The terms of one element.
template <typename Element>
Wide element_term(const std::byte* pointer, uint64_t index) {
  constexpr uint64_t kNumPerWord = 8 / sizeof(Element);
  Element element;
  std::memcpy(&element, pointer, sizeof(Element));
  const Wide in_place = (static_cast<Wide>(element) + 1) << (8 * sizeof(Element) * (index % kNumPerWord));
  return position_factor(index / kNumPerWord) * in_place;
}

template <typename Element>
Wide digest_run(const std::byte* elements, uint64_t index, uint64_t length) {
  constexpr uint64_t kNumPerWord = 8 / sizeof(Element);
  // 1 in the lowest bit of each element: 0x0001000100010001 for elements of two bytes.
  constexpr uint64_t kOnes =
      sizeof(Element) == 8 ? 1 : ~uint64_t{0} / ((uint64_t{1} << (8 * sizeof(Element) % 64)) - 1);
  Wide sum = 0;
  for (; length > 0 && index % kNumPerWord != 0; ++index, --length, elements += sizeof(Element)) {
    sum += element_term<Element>(elements, index);
  }
  uint64_t word_index = index / kNumPerWord;
  for (; length >= kNumPerWord; ++word_index, length -= kNumPerWord, elements += 8) {
    uint64_t word;  // little-endian: the first element in the lowest bits
    std::memcpy(&word, elements, sizeof(word));
    sum += position_factor(word_index) * (static_cast<Wide>(word) + kOnes);
  }
  for (index = word_index * kNumPerWord; length > 0; ++index, --length, elements += sizeof(Element)) {
    sum += element_term<Element>(elements, index);
  }
  return sum;
}

template <typename Element>
Wide digest_row(const std::byte* elements, uint64_t first_index, const DigestAxis& axis) {
  if (axis.memory_stride == sizeof(Element) && axis.index_stride == 1) {
    return digest_run<Element>(elements, first_index, static_cast<uint64_t>(axis.length));
  }
  Wide sum = 0;
  for (int64_t i = 0; i < axis.length; ++i) {
    sum += element_term<Element>(elements + i * axis.memory_stride,
                                 first_index + static_cast<uint64_t>(i * axis.index_stride));
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
  RLINF_CHECK_USER(
      element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8 || element_bytes == 16,
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
