#include "rlinf/comm/process_id.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "rlinf/comm/check.h"
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

namespace {

// Of 31 bits, so that it goes into a signed word beside an inode number; never 0.
uint32_t random_server_nonce() {
  uint32_t nonce = 0;
  RLINF_CHECK_SYSTEM(::getrandom(&nonce, sizeof(nonce), 0) == sizeof(nonce), "getrandom");
  return (nonce >> 1) | 1;
}

}  // namespace

ProcessId current_process() {
  // A system call costs more than all the rest of a put, so the answer is kept and forgotten by forked children.
  static std::atomic<uint64_t> start_ticks{0};
  static std::atomic<uint64_t> pid_namespace{0};
  static std::atomic<uint32_t> server_nonce{0};
  static std::atomic<int32_t> pid{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] {
    pid.store(0, std::memory_order_relaxed);
    server_nonce.store(0, std::memory_order_relaxed);
  });
  static_cast<void>(registered);
  int32_t known = pid.load(std::memory_order_acquire);
  if (known == 0) {
    known = ::getpid();
    struct stat status{};
    pid_namespace.store(::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0, std::memory_order_relaxed);
    start_ticks.store(read_stat(known).start_ticks, std::memory_order_relaxed);
    uint32_t unused = 0;  // the first of several threads makes the nonce
    server_nonce.compare_exchange_strong(unused, random_server_nonce());
    pid.store(known, std::memory_order_release);
  }
  return ProcessId{known, start_ticks.load(std::memory_order_relaxed), pid_namespace.load(std::memory_order_relaxed),
                   server_nonce.load(std::memory_order_relaxed)};
}

namespace {

bool is_alive_by_stat(const ProcessId& process) {
  const ProcessStat stat = read_stat(process.pid);
  return stat.found && stat.state != 'Z' && stat.state != 'X' && stat.start_ticks == process.start_ticks;
}

int open_pidfd(int32_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));  // closed by exec
#else
  static_cast<void>(pid);
  errno = ENOSYS;
  return -1;
#endif
}

// Descriptors of processes that were alive when last looked at, so that a look costs one poll instead of opening,
// reading and parsing a file. One for this process; a forked child starts anew.
class PidfdCache {
 public:
  static PidfdCache& instance() {
    static PidfdCache* const cache = [] {
      auto* made = new PidfdCache;  // never freed: threads outlive static destructors
      ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                       [] {
                         instance().close_all();
                         instance().mutex_.unlock();
                       });
      return made;
    }();
    return *cache;
  }

  bool is_alive(const ProcessId& process) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known =
        std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.process == process; });
    if (known != entries_.end()) {
      pollfd state{known->fd, POLLIN, 0};
      if (::poll(&state, 1, 0) == 0) {
        known->last_used = ++num_uses_;
        return true;
      }
      // Dead; or somebody has closed a descriptor that is not his, and its number may be that of another file by now.
      const bool alive = is_alive_by_stat(process);
      if ((state.revents & POLLNVAL) == 0 && !alive) {
        ::close(known->fd);
      }
      entries_.erase(known);
      return alive;
    }
    // Opened before the start time is read: if that is right, it is the process of that start time that was opened.
    const int fd = open_pidfd(process.pid);
    if (fd < 0 && errno == ESRCH) {
      return false;
    }
    const bool alive = is_alive_by_stat(process);
    if (fd >= 0 && alive) {
      make_room();
      entries_.push_back(Entry{process, fd, ++num_uses_});
    } else if (fd >= 0) {
      ::close(fd);
    }
    return alive;
  }

 private:
  struct Entry {
    ProcessId process;
    int fd;
    uint64_t last_used;
  };
  static constexpr size_t kMaxEntries = 64;

  // Drops the dead, which nobody may ask for again; and the one that was not asked for the longest, if need be.
  void make_room() {
    const auto is_dead = [](const Entry& entry) {
      pollfd state{entry.fd, POLLIN, 0};
      if (::poll(&state, 1, 0) == 0) {
        return false;
      }
      if ((state.revents & POLLNVAL) == 0 && !is_alive_by_stat(entry.process)) {
        ::close(entry.fd);
      }
      return true;
    };
    entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_dead), entries_.end());
    if (entries_.size() >= kMaxEntries) {
      const auto oldest = std::min_element(entries_.begin(), entries_.end(),
                                           [](const Entry& a, const Entry& b) { return a.last_used < b.last_used; });
      ::close(oldest->fd);
      entries_.erase(oldest);
    }
  }

  void close_all() {
    for (const Entry& entry : entries_) {
      ::close(entry.fd);
    }
    entries_.clear();
  }

  std::mutex mutex_;
  std::vector<Entry> entries_;
  uint64_t num_uses_ = 0;
};

}  // namespace

bool is_alive(const ProcessId& process) {
  const ProcessId current = current_process();
  if (process.pid_namespace != 0 && process.pid_namespace != current.pid_namespace) {
    return has_segment_server(process);
  }
  if (process.pid == current.pid) {
    return process.start_ticks == current.start_ticks;
  }
  return PidfdCache::instance().is_alive(process);
}

}  // namespace rlinf::comm
