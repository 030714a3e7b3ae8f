// Names a process for as long as it lives. A bare pid may be given to another process later; together with the start
// time it is unique until the next boot.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace rlinf::comm {

struct ProcessId {
  int32_t pid;
  uint32_t server_nonce;   // random, a part of the name of its segment server; 0: not known
  uint64_t start_ticks;    // field 22 of /proc/<pid>/stat, clock ticks since boot
  uint64_t pid_namespace;  // inode of /proc/self/ns/pid; 0: that of whoever asks

  constexpr ProcessId(int32_t pid = 0, uint64_t start_ticks = 0, uint64_t pid_namespace = 0, uint32_t server_nonce = 0)
      : pid(pid), server_nonce(server_nonce), start_ticks(start_ticks), pid_namespace(pid_namespace) {}

  bool operator==(const ProcessId& other) const {
    return pid == other.pid && start_ticks == other.start_ticks && pid_namespace == other.pid_namespace;
  }
};

// The calling process. Right in a forked child, too.
ProcessId current_process();

// False when the process is gone, is a zombie, or its pid belongs to a younger process. A process of another pid
// namespace, which /proc does not show, is asked through its segment server.
bool is_alive(const ProcessId& process);

}  // namespace rlinf::comm
