// memcpy, and past the caches for large buffers where that is faster.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rlinf/comm/store_choice.h"

namespace rlinf::comm {

// From this size on the stores may bypass the caches, where that is measured to be faster. Below it, a consumer on a
// neighbouring core profits from finding the bytes in the cache.
constexpr uint64_t kStreamingCopyBytes = uint64_t{4} << 20;

// Regions must not overlap. Where the choice is measured, sizes up to the next power of two share an answer.
void copy_bytes(void* destination, const void* source, uint64_t num_bytes, Stores stores = stores_of_environment());

}  // namespace rlinf::comm
