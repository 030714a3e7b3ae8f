#include <algorithm>
#include <cstring>

#include "rlinf/comm/check.h"
#include "rlinf/comm/digest.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "DigestAdder reads words as little-endian"
#endif

namespace rlinf::comm {

namespace {

// 64-bit odd constants without structure: the fractional parts of the golden ratio and of the square root of 3.
constexpr uint64_t kIndexStep = 0x9e3779b97f4a7c15;
constexpr uint64_t kSpread = 0xbb67ae8584caa73b;
constexpr uint64_t kDigit = (uint64_t{1} << 52) - 1;

inline DigestSum factor_of(uint64_t word_index) {
  uint64_t state = (word_index + 1) * kIndexStep;
  state ^= state >> 32;
  state *= kSpread;
  state ^= state >> 29;
  const DigestSum product = static_cast<DigestSum>(state >> 12) * (kIndexStep & kDigit);
  return (state << 1 & kDigit) | 1 | (product >> 52 << 52) | (product << 104);
}

uint64_t ones_for(int64_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return 0x0101010101010101;
    case 2:
      return 0x0001000100010001;
    case 4:
      return 0x0000000100000001;
    default:
      return 1;
  }
}

}  // namespace

DigestSum position_factor(uint64_t word_index) {
  return factor_of(word_index);
}

DigestAdder::DigestAdder(int64_t element_bytes, InstructionSet instructions)
    : element_bytes_(element_bytes),
      num_per_word_(8 / element_bytes),
      ones_(ones_for(element_bytes)),
      has_lanes_(instructions == InstructionSet::kAvx512 && has_wide_multiply()) {
  RLINF_CHECK_INTERNAL(element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8,
                       element_bytes);
}

DigestSum DigestAdder::element_term(const std::byte* pointer, uint64_t index) const {
  uint64_t element = 0;
  std::memcpy(&element, pointer, static_cast<size_t>(element_bytes_));
  const auto num_per_word = static_cast<uint64_t>(num_per_word_);
  const uint64_t shift = 8 * static_cast<uint64_t>(element_bytes_) * (index % num_per_word);
  return factor_of(index / num_per_word) * ((static_cast<DigestSum>(element) + 1) << shift);
}

void DigestAdder::add_run(const std::byte* elements, uint64_t index, int64_t length) {
  const auto num_per_word = static_cast<uint64_t>(num_per_word_);
  for (; length > 0 && index % num_per_word != 0; ++index, --length, elements += element_bytes_) {
    sum_ += element_term(elements, index);
  }
  const int64_t num_words = length / num_per_word_;
  add_words(elements, index / num_per_word, num_words);
  elements += 8 * num_words;
  index += num_per_word * static_cast<uint64_t>(num_words);
  for (length -= num_words * num_per_word_; length > 0; ++index, --length, elements += element_bytes_) {
    sum_ += element_term(elements, index);
  }
}

void DigestAdder::add_strided(const std::byte* elements, int64_t memory_stride, uint64_t index, int64_t index_stride,
                              int64_t length) {
  for (int64_t i = 0; i < length; ++i) {
    sum_ += element_term(elements + i * memory_stride, index + static_cast<uint64_t>(i * index_stride));
  }
}

void DigestAdder::add_words(const std::byte* words, uint64_t word_index, int64_t num_words) {
#if defined(__x86_64__)
  while (has_lanes_ && num_words > 0) {
    const int64_t step = std::min(num_words, 8 * steps_left());
    add_words_avx512(lanes_, words, word_index, step, ones_);
    words += 8 * step;
    word_index += static_cast<uint64_t>(step);
    num_words -= step;
  }
#endif
  DigestSum sum = 0;
  for (int64_t i = 0; i < num_words; ++i) {
    uint64_t word;  // little-endian: the first element in the lowest bits
    std::memcpy(&word, words + 8 * i, sizeof(word));
    sum += factor_of(word_index + static_cast<uint64_t>(i)) * (static_cast<DigestSum>(word) + ones_);
  }
  sum_ += sum;
}

void DigestAdder::copy_lines([[maybe_unused]] std::byte* dst, [[maybe_unused]] const std::byte* src,
                             [[maybe_unused]] uint64_t index, int64_t num_lines, [[maybe_unused]] bool casts,
                             [[maybe_unused]] bool streams) {
  RLINF_CHECK_INTERNAL(has_lanes_ || num_lines == 0, num_lines);
#if defined(__x86_64__)
  uint64_t word_index = index / static_cast<uint64_t>(num_per_word_);
  while (num_lines > 0) {
    const int64_t step = std::min(num_lines, steps_left());
    copy_words_avx512(lanes_, dst, src, word_index, step, ones_, casts, streams);
    dst += 64 * step;
    src += (casts ? 128 : 64) * step;
    word_index += static_cast<uint64_t>(8 * step);
    num_lines -= step;
  }
#endif
}

int64_t DigestAdder::steps_left() {
  if (lanes_.num_steps == kMaxDigestSteps) {
    flush();
  }
  return kMaxDigestSteps - lanes_.num_steps;
}

void DigestAdder::flush() {
  for (int digit = 0; digit < 3; ++digit) {
    for (int lane = 0; lane < 8; ++lane) {
      sum_ += static_cast<DigestSum>(lanes_.digits[digit][lane]) << (52 * digit);
    }
  }
  lanes_ = DigestLanes{};
}

DigestSum DigestAdder::sum() {
  if (lanes_.num_steps > 0) {
    flush();
  }
  return sum_;
}

}  // namespace rlinf::comm
