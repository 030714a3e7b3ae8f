#include "rlinf/comm/sync.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

// A hand-over between two busy processes takes 1-4 us, a futex sleep and wake-up 10-40 us. A spin only pays when
// whoever ends it runs on another core; on a shared core it keeps the other side from running (64 pauses made a round
// trip of 11 us one of 18).
constexpr int kShortSpin = 64;
constexpr int kLongSpin = 1024;
constexpr int kLockSpin = 64;
// A sleep shorter than this would have been better spent spinning.
constexpr int64_t kWorthSpinningNs = 60'000;

// How long this thread spins for a peer on another core: grows with spins that were worth it, shrinks with others.
thread_local int long_spin = kLongSpin;

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void RobustMutex::init() {
  pthread_mutexattr_t attributes;
  RLINF_CHECK_INTERNAL(::pthread_mutexattr_init(&attributes) == 0, "");
  RLINF_CHECK_INTERNAL(::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0, "");
  RLINF_CHECK_INTERNAL(::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0, "");
  RLINF_CHECK_INTERNAL(::pthread_mutex_init(&mutex_, &attributes) == 0, "");
  ::pthread_mutexattr_destroy(&attributes);
}

bool RobustMutex::lock() {
  // The lock is held for less than a microsecond, a sleep in the kernel takes ten.
  int error = ::pthread_mutex_trylock(&mutex_);
  for (int i = 0; i < kLockSpin && error == EBUSY; ++i) {
    pause_cpu();
    error = ::pthread_mutex_trylock(&mutex_);
  }
  while (error == EBUSY || error == ETIMEDOUT) {
    // Not without an end: the wake-up of a sleeper is lost when it went to another one that was killed before it had
    // the lock, while a third took the lock without knowing of sleepers.
    timespec slice{};
    const int64_t end_ns = monotonic_ns() + kWaitSliceNs;
    slice.tv_sec = end_ns / 1'000'000'000;
    slice.tv_nsec = end_ns % 1'000'000'000;
    error = ::pthread_mutex_clocklock(&mutex_, CLOCK_MONOTONIC, &slice);
  }
  if (error == EOWNERDEAD) {
    return true;
  }
  RLINF_CHECK_INTERNAL(error == 0, "pthread_mutex_clocklock: ", std::strerror(error));
  return false;
}

void RobustMutex::mark_consistent() {
  RLINF_CHECK_INTERNAL(::pthread_mutex_consistent(&mutex_) == 0, "");
}

void RobustMutex::unlock() {
  const int error = ::pthread_mutex_unlock(&mutex_);
  RLINF_CHECK_NOTHROW(error == 0, "pthread_mutex_unlock failed");
}

void EventWord::notify_all() {
  const int cpu = ::sched_getcpu();
  if (notifier_cpu_.load(std::memory_order_relaxed) != cpu) {
    notifier_cpu_.store(cpu, std::memory_order_relaxed);
  }
  sequence_.fetch_add(1, std::memory_order_seq_cst);
  if (num_waiters_.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &sequence_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool EventWord::spin(uint32_t seen, int num_pauses) const {
  for (int i = 0; i < num_pauses; ++i) {
    if (sequence() != seen) {
      return true;
    }
    pause_cpu();
  }
  return false;
}

void EventWord::wait(uint32_t seen, int64_t deadline_ns) {
  // Whoever shares this core cannot run while this thread spins.
  const bool has_own_core = notifier_cpu_.load(std::memory_order_relaxed) != ::sched_getcpu();
  if (has_own_core && spin(seen, long_spin)) {
    long_spin = std::min(2 * long_spin, kLongSpin);
    return;
  }
  const int64_t start_ns = monotonic_ns();
  const int64_t left_ns = std::min(deadline_ns - start_ns, kWaitSliceNs);
  if (left_ns <= 0) {
    return;
  }
  timespec timeout{};
  timeout.tv_sec = left_ns / 1'000'000'000;
  timeout.tv_nsec = left_ns % 1'000'000'000;
  num_waiters_.fetch_add(1, std::memory_order_seq_cst);
  // Not FUTEX_PRIVATE: the waker may be another process. Returns at once when the word has already changed.
  ::syscall(SYS_futex, &sequence_, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  num_waiters_.fetch_sub(1, std::memory_order_seq_cst);
  if (has_own_core) {
    const bool was_short = monotonic_ns() - start_ns < kWorthSpinningNs;
    long_spin = was_short ? std::min(2 * long_spin, kLongSpin) : std::max(long_spin / 2, kShortSpin);
  }
}

}  // namespace rlinf::comm
