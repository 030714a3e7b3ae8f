// A 128-bit digest of a part of a tensor, which adds up: digests of disjoint parts sum to the digest of the whole, in
// whatever order and by whomever they were computed.
//
// The tensor's bytes are seen as 8-byte words, each holding 8 / element_bytes elements, and
//     digest = sum over words j of K(j) * (word j + one in each element's lowest bit),  modulo 2^128,
// where K is a pseudo-random odd 128-bit number, made of a 64-bit one as digits of base 2^52. A part that holds only some
// of a word's elements adds only their terms of that product, so any two disjoint parts add up. This is multilinear
// hashing (Carter and Wegman 1979; Lemire and Kaser 2014): tensors that differ within one word always differ in their
// digest, since K is odd and so invertible; others agree with a probability of about 2^-63. Elements that change places
// change it, and zeros count. It is made against accidents, not against an adversary.
//
// Whole words go through AVX-512's 52-bit multiply-add where the machine has it, eight at a time; the sum is the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rlinf/comm/data_type.h"

namespace rlinf::comm {

using DigestSum = unsigned __int128;

struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
};

// K(j): a pseudo-random odd number.
DigestSum position_factor(uint64_t word_index);

// Partial sums of eight words at a time, as three digits of base 2^52 each, kept from run to run.
struct alignas(64) DigestLanes {
  uint64_t digits[3][8] = {};
  int num_steps = 0;  // since the last flush; a digit overflows after kMaxDigestSteps
};
constexpr int kMaxDigestSteps = 1000;  // 4 additions of less than 2^52 to a digit in each step: 4000 * 2^52 < 2^64

// Adds up to kMaxDigestSteps - num_steps times 8 words, to each of which `ones` is added; only where
// has_wide_multiply().
void add_words_avx512(DigestLanes& lanes, const std::byte* words, uint64_t word_index, int64_t num_words,
                      uint64_t ones);

// Adds up 8 * num_steps words, at most as many steps as above, and writes them to `dst`.
// casts: `src` holds float32, of which the words are the bfloat16. streams: past the caches, to a multiple of 64 bytes.
void copy_words_avx512(DigestLanes& lanes, std::byte* dst, const std::byte* src, uint64_t word_index,
                       int64_t num_steps, uint64_t ones, bool casts, bool streams);

// Adds up the digest of runs of elements.
class DigestAdder {
 public:
  // element_bytes: 1, 2, 4 or 8.
  DigestAdder(int64_t element_bytes, InstructionSet instructions);
  // `length` neighbours in memory, which are neighbours in the tensor too. index: the first one's in the tensor.
  void add_run(const std::byte* elements, uint64_t index, int64_t length);
  // Elements with any strides: bytes in memory, elements in the tensor.
  void add_strided(const std::byte* elements, int64_t memory_stride, uint64_t index, int64_t index_stride,
                   int64_t length);
  // Whether copy_lines() is there.
  bool can_copy() const { return has_lanes_; }
  // As add_run() of what it writes: whole lines of 64 bytes, from the first element of a word on. The rest as
  // copy_words_avx512().
  void copy_lines(std::byte* dst, const std::byte* src, uint64_t index, int64_t num_lines, bool casts, bool streams);
  DigestSum sum();

 private:
  DigestSum element_term(const std::byte* pointer, uint64_t index) const;
  void add_words(const std::byte* words, uint64_t word_index, int64_t num_words);
  int64_t steps_left();  // of the lanes, at least one
  void flush();

  int64_t element_bytes_;
  int64_t num_per_word_;
  uint64_t ones_;  // 1 in the lowest bit of each element: 0x0001000100010001 for elements of two bytes
  bool has_lanes_;
  DigestSum sum_ = 0;
  DigestLanes lanes_;
};

}  // namespace rlinf::comm
