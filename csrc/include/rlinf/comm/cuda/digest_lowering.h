// From boxes of tensors to the tiles of the digest kernel. Host code without CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "rlinf/comm/cuda/digest_tile.h"
#include "rlinf/comm/digest.h"

namespace rlinf::comm::cuda {

// Appends the tiles of one box; the arguments are those of digest_box, `piece` says which sum they add to.
void lower_digest(uint64_t address, uint64_t element_bytes, uint64_t first_index, std::vector<DigestAxis> axes,
                  uint32_t piece, std::vector<DigestTile>& tiles);

// What the kernel does, on the CPU. `sums`: one for each piece, added to.
void digest_tiles_on_cpu(const DigestTile* tiles, uint64_t num_tiles, Digest* sums, uint64_t num_sums);

}  // namespace rlinf::comm::cuda
