// Holds a robust mutex of a structure in shared memory, and has it repaired when its last owner died in the middle of a
// change.
#pragma once

#include "rlinf/comm/sync.h"

namespace rlinf::comm {

// `Owner` befriends this class and has repair(), called under the mutex; it throws what is beyond repair.
template <typename Owner>
class RepairingLock {
 public:
  RepairingLock(Owner& owner, RobustMutex& mutex) : owner_(owner), mutex_(mutex) { acquire(); }
  ~RepairingLock() {
    if (held_) {
      mutex_.unlock();
    }
  }
  RepairingLock(const RepairingLock&) = delete;
  RepairingLock& operator=(const RepairingLock&) = delete;

  // Waits for `event` without the mutex. The caller has seen, under the mutex, that its condition is false.
  void wait(EventWord& event, int64_t deadline_ns) {
    const uint32_t seen = event.sequence();
    mutex_.unlock();
    held_ = false;
    event.wait(seen, deadline_ns);
    acquire();
  }
  // For tests.
  void keep_forever() { held_ = false; }

 private:
  void acquire() {
    const bool owner_died = mutex_.lock();
    held_ = true;
    if (owner_died) {
      try {
        owner_.repair();
      } catch (...) {
        mutex_.unlock();  // beyond repair: every later lock() fails instead of waiting for ever
        held_ = false;
        throw;
      }
      mutex_.mark_consistent();
    }
  }

  Owner& owner_;
  RobustMutex& mutex_;
  bool held_ = false;
};

}  // namespace rlinf::comm
