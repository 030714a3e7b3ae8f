/* A libcuda.so.1 without a driver: logs each call; one function, chosen by name, fails with 801. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long long u64;
typedef struct { unsigned char bytes[64]; } Handle;
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *meta; unsigned char rest[8]; } Properties;
typedef struct { Location location; int flags; } Access;

static char text[65536], failing[64];
static int depth = 0;

static int say(const char *name, const char *format, ...) {
  size_t used = strlen(text);
  used += snprintf(text + used, sizeof(text) - used, "%s", name);
  va_list arguments;
  va_start(arguments, format);
  used += vsnprintf(text + used, sizeof(text) - used, format, arguments);
  va_end(arguments);
  snprintf(text + used, sizeof(text) - used, " @%d\n", depth);
  return strcmp(name, failing) == 0 ? 801 : 0;
}
const char *take_log(void) {
  static char copy[65536];
  strcpy(copy, text);
  text[0] = 0;
  return copy;
}
void fail_in(const char *name) { strcpy(failing, name); }
int context_depth(void) { return depth; }

int cuInit(unsigned flags) { (void)flags; return strcmp("cuInit", failing) == 0 ? 100 : 0; }
int cuGetErrorName(int error, const char **name) { *name = error == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : "OTHER"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)(0xc0 + device); return say("retain", " %d", device); }
int cuCtxPushCurrent_v2(void *context) { (void)context; ++depth; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = 0; --depth; return 0; }
int cuMemAlloc_v2(u64 *pointer, size_t n) { *pointer = 0x5000; return say("alloc", " %zu", n); }
int cuMemFree_v2(u64 pointer) { return say("free", " %llx", pointer); }
int cuMemGetAddressRange_v2(u64 *base, size_t *n, u64 pointer) { *base = 0x5000; *n = 100; return say("range", " %llx", pointer); }
int cuIpcGetMemHandle(Handle *handle, u64 pointer) { memset(handle, 0x41, 64); return say("export", " %llx", pointer); }
int cuIpcOpenMemHandle_v2(u64 *pointer, Handle handle, unsigned flags) {
  *pointer = 0x6000;
  return say("open", " %c%c flags=%u", handle.bytes[0], handle.bytes[63], flags);
}
int cuIpcCloseMemHandle(u64 pointer) { return say("close", " %llx", pointer); }
int cuMemGetAllocationGranularity(size_t *n, const Properties *p, int option) { (void)p; (void)option; *n = 4096; return 0; }
int cuMemCreate(u64 *handle, size_t n, const Properties *p, u64 flags) {
  *handle = 0x99;
  return say("create", " %zu type=%d handles=%d location=%d,%d flags=%llu", n, p->type, p->handle_types, p->location.type, p->location.id, flags);
}
int cuMemRelease(u64 handle) { return say("release", " %llx", handle); }
int cuMemAddressReserve(u64 *pointer, size_t n, size_t alignment, u64 fixed, u64 flags) {
  (void)alignment; (void)fixed; (void)flags;
  *pointer = 0x7000;
  return say("reserve", " %zu", n);
}
int cuMemAddressFree(u64 pointer, size_t n) { return say("unreserve", " %llx %zu", pointer, n); }
int cuMemMap(u64 pointer, size_t n, size_t offset, u64 handle, u64 flags) { (void)flags; return say("map", " %llx %zu %zu %llx", pointer, n, offset, handle); }
int cuMemUnmap(u64 pointer, size_t n) { return say("unmap", " %llx %zu", pointer, n); }
int cuMemSetAccess(u64 pointer, size_t n, const Access *access, size_t count) {
  return say("access", " %llx %zu location=%d,%d flags=%d x%zu", pointer, n, access->location.type, access->location.id, access->flags, count);
}
int cuMemExportToShareableHandle(void *out, u64 handle, int type, u64 flags) {
  (void)flags;
  *(int *)out = 55;
  return say("share", " %llx type=%d", handle, type);
}
int cuMemImportFromShareableHandle(u64 *handle, void *in, int type) {
  *handle = 0x9a;
  return say("import", " %ld type=%d", (long)in, type);
}
int cuMemcpyHtoD_v2(u64 target, const void *source, size_t n) { return say("write", " %llx %.*s", target, (int)n, (const char *)source); }
int cuMemcpyDtoH_v2(void *target, u64 source, size_t n) { memset(target, 'z', n); return say("read", " %llx %zu", source, n); }
