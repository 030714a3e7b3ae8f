// A child process that is single-stepped with ptrace, to be killed right after any instruction that changes shared
// memory: between those, nothing that survives the child differs.
#pragma once

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "rlinf/comm/segment.h"

namespace rlinf::comm {

constexpr int kSkipped = 77;

// A child that runs the scenario, stopped before its first instruction.
class SteppedChild {
 public:
  template <typename Scenario>
  explicit SteppedChild(Scenario scenario) : pid_(::fork()) {
    if (pid_ == 0) {
      ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
      ::raise(SIGSTOP);
      scenario();
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    if (!WIFSTOPPED(status)) {
      skip();
    }
  }
  ~SteppedChild() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  SteppedChild(const SteppedChild&) = delete;
  SteppedChild& operator=(const SteppedChild&) = delete;

  // One instruction. False when the scenario has ended.
  bool step() {
    if (::ptrace(PTRACE_SINGLESTEP, pid_, nullptr, nullptr) != 0) {
      skip();
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    if (WIFEXITED(status)) {
      pid_ = 0;
      return false;
    }
    return true;
  }

 private:
  void skip() {
    std::cerr << "single-stepping a child is not possible here; the crash test is skipped\n";
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
    }
    std::exit(kSkipped);
  }
  pid_t pid_;
};

// Bytes of shared memory that a scenario changes.
struct Watched {
  const std::byte* bytes;
  uint64_t num_bytes;
};

// Steps a child until the watched memory has changed `num_changes` times, and kills it. False when it ended before.
template <typename Scenario>
bool run_and_kill(const std::vector<Watched>& watched, uint64_t num_changes, Scenario scenario) {
  std::vector<std::vector<std::byte>> before;
  for (const Watched& one : watched) {
    before.emplace_back(one.bytes, one.bytes + one.num_bytes);
  }
  SteppedChild child(scenario);
  while (num_changes > 0) {
    if (!child.step()) {
      return false;
    }
    bool has_changed = false;
    for (size_t i = 0; i < watched.size(); ++i) {
      if (std::memcmp(before[i].data(), watched[i].bytes, watched[i].num_bytes) != 0) {
        std::memcpy(before[i].data(), watched[i].bytes, watched[i].num_bytes);
        has_changed = true;
      }
    }
    num_changes -= has_changed;
  }
  return true;
}

}  // namespace rlinf::comm
