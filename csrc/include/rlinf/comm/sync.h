// Locks and wake-ups that live in shared memory and survive the death of a process at any instruction.
//
// The mutex is a robust pthread mutex. The wake-up is a bare futex word and not a pthread condition variable: a
// condition variable keeps internal state that a killed waiter leaves half-changed, a word that only counts up has no
// such state.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <limits>

namespace rlinf::comm {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
// Waits return to the caller at least this often, so that it can look at signals and at dead peers.
constexpr int64_t kWaitSliceNs = 100'000'000;

// CLOCK_MONOTONIC, nanoseconds; the same clock in every process.
int64_t monotonic_ns();

// Lives in shared memory: init() once by the creator, never destroyed.
class RobustMutex {
 public:
  void init();
  // True when the previous owner died while holding it: the caller must repair the guarded state and then call
  // mark_consistent().
  [[nodiscard]] bool lock();
  void mark_consistent();
  void unlock();

 private:
  pthread_mutex_t mutex_;
};

// An event count. A waiter reads sequence() while its condition is known to be false, then waits for it to change;
// whoever makes the condition true calls notify_all() afterwards. No wake-up can fall in between.
class EventWord {
 public:
  uint32_t sequence() const { return sequence_.load(std::memory_order_acquire); }
  void notify_all();
  // Returns when the sequence is no longer `seen`, at `deadline_ns`, or when a signal arrives.
  void wait(uint32_t seen, int64_t deadline_ns);

 private:
  bool spin(uint32_t seen, int num_pauses) const;

  std::atomic<uint32_t> sequence_;
  std::atomic<int32_t> notifier_cpu_;  // where the last notify_all() ran
  std::atomic<uint32_t> num_waiters_;  // too high after a waiter was killed, which only costs a system call
};

}  // namespace rlinf::comm
