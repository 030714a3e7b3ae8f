// From copies whose digests are wanted to the tiles of three kernels: one that copies and digests in a pass, and, for
// what does not align with it, those that copy and then digest. Host code without CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "rlinf/comm/cuda/copy_lowering.h"
#include "rlinf/comm/cuda/digest_lowering.h"
#include "rlinf/comm/cuda/digested_copy_tile.h"

namespace rlinf::comm::cuda {

// A copy, and where its elements are in the tensor of which they are a part.
struct DigestedCopy {
  StridedCopy copy;
  std::vector<int64_t> index_strides;  // by dimension of the copy: elements of the whole tensor
  uint64_t first_index;                // flat index, in the whole tensor, of the first element
  uint32_t piece;                      // which sum it adds to
};

struct DigestedCopyTiles {
  std::vector<DigestedCopyTile> together;
  std::vector<CopyTile> copies;
  std::vector<DigestTile> digests;  // of destinations, so they run after `copies`
};

// Appends the tiles of one copy; max_run_words: as in lower_digest. Throws UserError as lower_copy does.
void lower_digested_copy(const DigestedCopy& copy, int64_t max_run_words, DigestedCopyTiles& tiles);

// What the kernels do, on the CPU. `sums`: one for each piece, added to.
void run_digested_copies_on_cpu(const DigestedCopyTiles& tiles, Digest* sums, uint64_t num_sums);

}  // namespace rlinf::comm::cuda
