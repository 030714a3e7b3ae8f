// From boxes of tensors to the tiles of the digest kernel. Host code without CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "rlinf/comm/cuda/digest_tile.h"
#include "rlinf/comm/digest.h"

namespace rlinf::comm::cuda {

// One axis of a box: its length, its stride in memory, and its stride in the flat index of the whole tensor.
struct DigestAxis {
  int64_t length;
  int64_t memory_stride;  // bytes
  int64_t index_stride;   // elements of the whole tensor
};

// Appends the tiles of one box. element_bytes: 1, 2, 4 or 8. first_index: flat index, in the whole tensor, of the box's
// first element. `piece` says which sum the tiles add to. max_run_words: of a tile of runs.
void lower_digest(uint64_t address, uint64_t element_bytes, uint64_t first_index, std::vector<DigestAxis> axes,
                  uint32_t piece, int64_t max_run_words, std::vector<DigestTile>& tiles);

// The max_run_words for boxes of so many bytes in all: the more there are, the longer the tiles, of which the host makes
// and uploads each.
int64_t run_words_of(int64_t num_bytes);

// What the kernel does, on the CPU. `sums`: one for each piece, added to.
void digest_tiles_on_cpu(const DigestTile* tiles, uint64_t num_tiles, Digest* sums, uint64_t num_sums);

}  // namespace rlinf::comm::cuda
