/* Counts the bytes of heap blocks that are in use, and their largest sum; loaded with LD_PRELOAD.
 *
 * Resident memory also holds blocks that were freed and kept by malloc. A GPU's allocator is asked for what is in use,
 * which is what this counts: blocks of at least kSmallest bytes, from whichever thread, of torch and of gloo alike, and
 * anonymous mappings. Calls go on to glibc by its own names, which every program finds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { kSmallest = 1024 }; /* Python's objects and containers are mostly smaller */

static atomic_long live, largest;

static void change(long size) {
  long now = atomic_fetch_add(&live, size) + size;
  long seen = atomic_load(&largest);
  while (now > seen && !atomic_compare_exchange_weak(&largest, &seen, now)) {
  }
}

static void add(void *block, long sign) {
  long size = block ? (long)malloc_usable_size(block) : 0;
  if (size >= kSmallest) change(sign * size);
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

enum { kMappings = 65536 };
static struct {
  void *start;
  size_t size;
} mappings[kMappings]; /* those that are counted; few are made, and none by malloc, which does not come here */
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void note(void *start, size_t size, void *instead, long sign) {
  while (atomic_flag_test_and_set(&busy)) {
  }
  for (int i = 0; i < kMappings; i++) {
    if (mappings[i].start != start || (sign < 0 && mappings[i].size != size)) continue;
    mappings[i].start = instead;
    mappings[i].size = size;
    change(sign * (long)size);
    break;
  }
  atomic_flag_clear(&busy);
}

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
  void *start = (void *)syscall(SYS_mmap, at, size, protection, flags, file, offset);
  if (start != MAP_FAILED && (flags & MAP_ANONYMOUS) && (protection & PROT_WRITE)) note(NULL, size, start, 1);
  return start;
}

int munmap(void *start, size_t size) {
  if (start) note(start, size, NULL, -1);
  return (int)syscall(SYS_munmap, start, size);
}

void *mmap64(void *at, size_t size, int protection, int flags, int file, off_t offset) {
  return mmap(at, size, protection, flags, file, offset);
}
