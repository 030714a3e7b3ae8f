// memcpy for large buffers that the writer will not read again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rlinf::comm {

// From this size on the stores bypass the caches: they spare the read of each destination line, worth 1.5-2x for
// buffers beyond the last-level cache. Below it, a consumer on a neighbouring core profits from finding the bytes in
// the cache.
constexpr uint64_t kStreamingCopyBytes = uint64_t{4} << 20;

// Regions must not overlap.
void copy_bytes(void* destination, const void* source, uint64_t num_bytes);

}  // namespace rlinf::comm
