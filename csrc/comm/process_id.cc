#include "rlinf/comm/process_id.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "rlinf/comm/segment_server.h"

namespace rlinf::comm {

namespace {

struct ProcessStat {
  bool found = false;
  char state = '?';
  uint64_t start_ticks = 0;
};

// Fields 3 (state) and 22 (start time) of /proc/<pid>/stat. The name in field 2 may hold anything, also spaces and
// brackets, so fields are counted from its last closing bracket.
ProcessStat read_stat(int32_t pid) {
  ProcessStat result;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return result;
  }
  char text[1024];
  const ssize_t length = ::read(fd, text, sizeof(text) - 1);
  ::close(fd);
  if (length <= 0) {
    return result;
  }
  text[length] = '\0';
  const char* cursor = std::strrchr(text, ')');
  if (cursor == nullptr || cursor[1] == '\0') {
    return result;
  }
  result.state = cursor[2];
  constexpr int kFieldsFromNameToStart = 20;
  for (int i = 0; i < kFieldsFromNameToStart && cursor != nullptr; ++i) {
    cursor = std::strchr(cursor + 1, ' ');
  }
  if (cursor == nullptr) {
    return result;
  }
  result.start_ticks = std::strtoull(cursor + 1, nullptr, 10);
  result.found = true;
  return result;
}

}  // namespace

ProcessId current_process() {
  // A system call costs more than all the rest of a put, so the answer is kept and forgotten by forked children.
  static std::atomic<uint64_t> start_ticks{0};
  static std::atomic<uint64_t> pid_namespace{0};
  static std::atomic<int32_t> pid{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { pid.store(0, std::memory_order_relaxed); });
  static_cast<void>(registered);
  int32_t known = pid.load(std::memory_order_acquire);
  if (known == 0) {
    known = ::getpid();
    struct stat status{};
    pid_namespace.store(::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0, std::memory_order_relaxed);
    start_ticks.store(read_stat(known).start_ticks, std::memory_order_relaxed);
    pid.store(known, std::memory_order_release);
  }
  return ProcessId{known, start_ticks.load(std::memory_order_relaxed), pid_namespace.load(std::memory_order_relaxed)};
}

bool is_alive(const ProcessId& process) {
  if (process.pid_namespace != 0 && process.pid_namespace != current_process().pid_namespace) {
    return has_segment_server(process);
  }
  const ProcessStat stat = read_stat(process.pid);
  return stat.found && stat.state != 'Z' && stat.state != 'X' && stat.start_ticks == process.start_ticks;
}

}  // namespace rlinf::comm
