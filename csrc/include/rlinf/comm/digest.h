// A 128-bit digest of a part of a tensor, which adds up: digests of disjoint parts sum to the digest of the whole, in
// whatever order and by whomever they were computed.
//
// The tensor's bytes are seen as 8-byte words, each holding 8 / element_bytes elements, and
//     digest = sum over words j of K(j) * (word j + one in each element's lowest bit),  modulo 2^128,
// where K is a pseudo-random odd 128-bit number. A part that holds only some of a word's elements adds only their terms
// of that product, so any two disjoint parts add up. This is multilinear hashing (Carter and Wegman 1979; Lemire and
// Kaser 2014): tensors that differ within one word always differ in their digest, since K is odd and so invertible;
// others agree with a probability below 2^-64. Elements that change places change it, and zeros count. It is made
// against accidents, not against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rlinf::comm {

struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
};

// One axis of the part: its length, its stride in memory, and its stride in the flat index of the whole tensor.
struct DigestAxis {
  int64_t length;
  int64_t memory_stride;  // bytes
  int64_t index_stride;   // elements of the whole tensor
};

// `first_index`: flat index, in the whole tensor, of the part's first element. element_bytes: 1, 2, 4, 8 or 16.
Digest digest_box(const std::byte* elements, uint64_t element_bytes, uint64_t first_index,
                  std::vector<DigestAxis> axes);

}  // namespace rlinf::comm
