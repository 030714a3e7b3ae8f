/* A libnccl.so.2 without NCCL: logs each call, and fails as it is told. Settings are set through ctypes. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char bytes[128]; } Id;
typedef struct { int state; int polls_left; int number; } Comm;
typedef struct {
  size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; const char *net; int share, traffic;
  const char *name;
} Config;

#ifndef VERSION
#define VERSION 22907
#endif
#define EXPORT __attribute__((visibility("default")))

static char text[65536];
EXPORT int polls = 2;         /* how often a new state is "in progress" before it is done; negative: for ever */
EXPORT int async_error = 0;   /* what it becomes then, instead of success */
EXPORT int send_result = 7;
EXPORT int child_is_none = 0;
EXPORT int abort_seconds = 0;
static int count = 0;

static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  size_t used = strlen(text);
  vsnprintf(text + used, sizeof(text) - used, format, arguments);
  va_end(arguments);
}
EXPORT const char *take_log(void) {
  static char copy[65536];
  strcpy(copy, text);
  text[0] = 0;
  return copy;
}
static Comm *make(void) {
  Comm *comm = calloc(1, sizeof(Comm));
  comm->polls_left = polls;
  comm->state = 7;
  comm->number = ++count;
  return comm;
}
static int begin(Comm *comm) {
  comm->polls_left = polls;
  comm->state = 7;
  return 7;
}

EXPORT int ncclGetVersion(int *version) { *version = VERSION; return 0; }
EXPORT int ncclGetUniqueId(Id *id) { memset(id, 0, sizeof(*id)); strcpy(id->bytes, "the id"); id->bytes[127] = 9; return 0; }
EXPORT const char *ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "some error"; }
EXPORT const char *ncclGetLastError(Comm *comm) { (void)comm; return "detail of it"; }
EXPORT int ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, Config *config) {
  *comm = make();
  say("init %d/%d id=%s,%d size=%zu magic=%x version=%u blocking=%d max_ctas=%d share=%d name=%s\n", rank, ranks, id.bytes,
      id.bytes[127], config->size, config->magic, config->version, config->blocking, config->max_ctas, config->share, config->name);
  return 7;
}
EXPORT int ncclCommGetAsyncError(Comm *comm, int *result) {
  if (comm->state == 7 && comm->polls_left >= 0 && comm->polls_left-- == 0) comm->state = async_error;
  *result = comm->state;
  return 0;
}
EXPORT int ncclCommFinalize(Comm *comm) { say("finalize\n"); return begin(comm); }
EXPORT int ncclCommDestroy(Comm *comm) { say("destroy %d\n", comm->number); return 0; }
EXPORT int ncclCommAbort(Comm *comm) { sleep(abort_seconds); say("abort %d\n", comm->number); return 0; }
EXPORT int ncclGroupStart(void) { say("start\n"); return 0; }
EXPORT int ncclGroupEnd(void) { say("end\n"); return 7; }
EXPORT int ncclSend(void *p, size_t n, int type, int peer, Comm *comm, void *stream) {
  say("send %p %zu type=%d to=%d stream=%p\n", p, n, type, peer, stream);
  if (send_result == 7) begin(comm);
  return send_result;
}
EXPORT int ncclRecv(void *p, size_t n, int type, int peer, Comm *comm, void *stream) {
  say("recv %p %zu type=%d from=%d stream=%p\n", p, n, type, peer, stream);
  return begin(comm);
}
EXPORT int ncclBroadcast(void *p, void *q, size_t n, int type, int root, Comm *comm, void *stream) {
  say("broadcast %p %p %zu type=%d root=%d stream=%p\n", p, q, n, type, root, stream);
  return begin(comm);
}
#ifndef OLD
EXPORT int ncclCommSplit(Comm *comm, int color, int key, Comm **child, Config *config) {
  (void)config;
  say("split %d color=%d key=%d\n", comm->number, color, key);
  *child = child_is_none ? NULL : make();
  return begin(comm);
}
EXPORT int ncclCommShrink(Comm *comm, int *lost, int n, Comm **child, Config *config, int flags) {
  (void)config;
  say("shrink %d flags=%d lost=", comm->number, flags);
  for (int i = 0; i < n; ++i) say("%d,", lost[i]);
  say("\n");
  *child = make();
  return 7;
}
EXPORT int ncclCommGetUniqueId(Comm *comm, Id *id) { (void)comm; memset(id, 7, sizeof(*id)); return 0; }
EXPORT int ncclCommGrow(Comm *comm, int ranks, const Id *id, int rank, Comm **child, Config *config) {
  (void)config;
  say("grow %d to %d id=%d rank=%d\n", comm ? comm->number : 0, ranks, id ? id->bytes[0] : -1, rank);
  *child = make();
  return 7;
}
EXPORT int ncclCommRevoke(Comm *comm, int flags) { say("revoke flags=%d\n", flags); return begin(comm); }
EXPORT int ncclCommSuspend(Comm *comm, int flags) { say("suspend flags=%d\n", flags); return begin(comm); }
EXPORT int ncclCommResume(Comm *comm) { say("resume\n"); return begin(comm); }
#endif
