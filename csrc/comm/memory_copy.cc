#include "rlinf/comm/memory_copy.h"

#include <cstring>

#include "rlinf/comm/row_kernels.h"

namespace rlinf::comm {

void copy_bytes(void* destination, const void* source, uint64_t num_bytes, Stores stores) {
  if (num_bytes == 0) {
    return;  // the pointers of an empty buffer may be null
  }
  if (num_bytes < kStreamingCopyBytes) {
    std::memcpy(destination, source, num_bytes);
    return;
  }
  static StoreChoice choices[64];  // by the number of bits of the size
  const StoreChoice::Run run(choices[63 - __builtin_clzll(num_bytes)], stores, num_bytes);
  if (!run.is_streaming()) {
    std::memcpy(destination, source, num_bytes);
    return;
  }
  static const RowKernel kernel =
      find_row_kernel(best_instruction_set(), DataType::kBytes1, DataType::kBytes1, false, true);
  kernel(Rows{static_cast<std::byte*>(destination), static_cast<const std::byte*>(source), 1, 0, 0,
              static_cast<int64_t>(num_bytes), 1, 1});
  streaming_fence();  // the commit that follows must not overtake the bytes
}

}  // namespace rlinf::comm
