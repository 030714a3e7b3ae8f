#include "rlinf/comm/sync.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

// A hand-over between two busy processes takes 1-4 us, a futex sleep and wake-up 10-40 us. Longer spins hurt where both
// sides share a core.
constexpr int kNumSpins = 64;

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
  const int error = ::pthread_mutex_lock(&mutex_);
  if (error == EOWNERDEAD) {
    return true;
  }
  RLINF_CHECK_INTERNAL(error == 0, "pthread_mutex_lock: ", std::strerror(error));
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
  sequence_.fetch_add(1, std::memory_order_seq_cst);
  if (num_waiters_.load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &sequence_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

void EventWord::wait(uint32_t seen, int64_t deadline_ns) {
  for (int i = 0; i < kNumSpins; ++i) {
    if (sequence() != seen) {
      return;
    }
    pause_cpu();
  }
  const int64_t left_ns = std::min(deadline_ns - monotonic_ns(), kWaitSliceNs);
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
}

}  // namespace rlinf::comm
