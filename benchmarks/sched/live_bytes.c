/* Counts the bytes of heap blocks that are in use, and their largest sum; loaded with LD_PRELOAD.
 *
 * Resident memory also holds blocks that were freed and kept by malloc. A GPU's allocator is asked for what is in use,
 * which is what this counts: blocks of at least kSmallest bytes, from whichever thread, of torch and of gloo alike.
 * Calls go on to glibc by its own names, which every program finds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { kSmallest = 1024 }; /* Python's objects and containers are mostly smaller */

static atomic_long live, largest;

static void add(void *block, long sign) {
  long size = block ? (long)malloc_usable_size(block) : 0;
  if (size < kSmallest) return;
  long now = atomic_fetch_add(&live, sign * size) + sign * size;
  long seen = atomic_load(&largest);
  while (now > seen && !atomic_compare_exchange_weak(&largest, &seen, now)) {
  }
}

long rlinf_live_bytes(void) { return atomic_load(&live); }
long rlinf_largest_bytes(void) { return atomic_load(&largest); }
void rlinf_forget_largest(void) { atomic_store(&largest, atomic_load(&live)); }

void *malloc(size_t size) {
  void *block = __libc_malloc(size);
  add(block, 1);
  return block;
}

void *calloc(size_t count, size_t size) {
  void *block = __libc_calloc(count, size);
  add(block, 1);
  return block;
}

void *realloc(void *old, size_t size) {
  add(old, -1);
  void *block = __libc_realloc(old, size);
  add(block ? block : size ? old : NULL, 1);
  return block;
}

void *memalign(size_t alignment, size_t size) {
  void *block = __libc_memalign(alignment, size);
  add(block, 1);
  return block;
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
  void *block = memalign(alignment, size);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}

void free(void *block) {
  add(block, -1);
  __libc_free(block);
}
