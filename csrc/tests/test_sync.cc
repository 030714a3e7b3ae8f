// A sleeper whose wake-up is lost: the lock becomes free, and nobody calls futex(FUTEX_WAKE). It happens when the wake-up
// goes to another sleeper that is killed before it has the lock, while a third thread takes the lock in between.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <iostream>
#include <thread>

#include "rlinf/comm/check.h"
#include "rlinf/comm/sync.h"

using namespace rlinf::comm;
using namespace std::chrono_literals;

namespace {

void lost_wake_up() {
  static RobustMutex mutex;
  mutex.init();
  // glibc keeps the owner in the mutex's first word, and a bit beside it that says whether somebody sleeps.
  auto* const word = reinterpret_cast<std::atomic<uint32_t>*>(&mutex);
  std::promise<void> is_held, may_end;
  std::thread owner([&] {
    RLINF_CHECK_INTERNAL(!mutex.lock(), "nobody has died");
    is_held.set_value();
    may_end.get_future().wait();  // never unlocks
  });
  is_held.get_future().wait();
  const uint32_t alone = word->load();
  std::promise<void> is_in;
  std::thread sleeper([&] {
    RLINF_CHECK_INTERNAL(!mutex.lock(), "nobody has died");
    mutex.unlock();
    is_in.set_value();
  });
  while (word->load() == alone) {
    std::this_thread::yield();  // until the sleeper has said that it sleeps
  }
  std::this_thread::sleep_for(20ms);
  word->store(0);
  if (is_in.get_future().wait_for(60s) != std::future_status::ready) {
    std::cerr << "the sleeper was never woken\n";
    std::_Exit(EXIT_FAILURE);
  }
  may_end.set_value();
  owner.join();
  sleeper.join();
  std::cout << "sync: ok\n";
}

}  // namespace

int main() {
  lost_wake_up();
  return EXIT_SUCCESS;
}
