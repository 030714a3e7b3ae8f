// The memory of a process under AddressSanitizer at its highest since begin(), for packages/rlinf-comm/tests/comm_fuzz.py.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

extern "C" {
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, size_t),
                                              void (*on_free)(const volatile void*));
size_t __sanitizer_get_allocated_size(const volatile void* pointer);
}

namespace {

std::atomic<int64_t> held_bytes{0};
std::atomic<int64_t> highest_bytes{0};

void on_malloc(const volatile void* pointer, size_t num_bytes) {
  if (pointer == nullptr) {
    return;
  }
  const int64_t held = held_bytes.fetch_add(static_cast<int64_t>(num_bytes)) + static_cast<int64_t>(num_bytes);
  int64_t highest = highest_bytes.load();
  while (held > highest && !highest_bytes.compare_exchange_weak(highest, held)) {
  }
}

void on_free(const volatile void* pointer) {
  if (pointer != nullptr) {
    held_bytes.fetch_sub(static_cast<int64_t>(__sanitizer_get_allocated_size(pointer)));
  }
}

}  // namespace

extern "C" {
int install() { return __sanitizer_install_malloc_and_free_hooks(&on_malloc, &on_free) != 0 ? 1 : 0; }
void begin() {
  held_bytes = 0;
  highest_bytes = 0;
}
int64_t peak_bytes() { return highest_bytes; }
}
