#include "rlinf/comm/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

// One call of run_tasks. Lives on the caller's stack: the caller leaves only when no helper is inside.
struct Job {
  const std::function<void(int64_t)>* task;
  int64_t num_tasks;
  std::atomic<int64_t> next{0};
  int num_helpers_wanted;      // guarded by the pool's mutex
  int num_helpers_inside = 0;  // likewise

  void work() {
    for (int64_t i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) {
      (*task)(i);
    }
  }
};

class ThreadPool {
 public:
  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      start_threads(job.num_helpers_wanted);
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    left_.wait(lock, [&] { return job.num_helpers_inside == 0; });
  }

  int num_threads() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(threads_.size());
  }

 private:
  void start_threads(int num_wanted) {
    if (static_cast<int>(threads_.size()) >= num_wanted) {
      return;
    }
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // a new thread inherits it; signals stay with the threads that know
    try {
      while (static_cast<int>(threads_.size()) < num_wanted) {
        threads_.emplace_back([this] { serve(); });
      }
    } catch (const std::system_error& error) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw SystemError(join_text("starting copy thread ", threads_.size() + 1, " of ", num_wanted),
                        error.code().value());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return is_stopping_ || (job = open_job()) != nullptr; });
      if (job == nullptr) {
        return;
      }
      --job->num_helpers_wanted;
      ++job->num_helpers_inside;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->num_helpers_inside == 0) {
        left_.notify_all();
      }
    }
  }

  Job* open_job() {
    for (Job* job : jobs_) {
      if (job->num_helpers_wanted > 0 && job->next.load() < job->num_tasks) {
        return job;
      }
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable left_;
  std::deque<Job*> jobs_;
  std::vector<std::thread> threads_;
  bool is_stopping_ = false;
};

std::atomic<ThreadPool*> current_pool{nullptr};

// The parent's threads do not exist in the child, and its mutex may be held: the object is left behind as it is.
void forget_pool() {
  current_pool.store(nullptr);
}

void join_pool() {
  delete current_pool.exchange(nullptr);
}

ThreadPool& pool() {
  static const bool is_registered = [] {
    RLINF_CHECK_SYSTEM(pthread_atfork(nullptr, nullptr, &forget_pool) == 0, "pthread_atfork");
    RLINF_CHECK_INTERNAL(std::atexit(&join_pool) == 0, "atexit");
    return true;
  }();
  static_cast<void>(is_registered);
  ThreadPool* existing = current_pool.load();
  if (existing != nullptr) {
    return *existing;
  }
  auto* created = new ThreadPool;  // no lock around this: it might be held while the process forks
  if (current_pool.compare_exchange_strong(existing, created)) {
    return *created;
  }
  delete created;
  return *existing;
}

}  // namespace

void run_tasks(int64_t num_tasks, int num_threads, const std::function<void(int64_t)>& task) {
  RLINF_CHECK_USER(num_threads >= 1 && num_threads <= kMaxThreads, "num_threads=", num_threads, "; allowed: 1 to ",
                   kMaxThreads);
  const int64_t num_helpers = std::min<int64_t>(num_tasks, num_threads) - 1;
  if (num_helpers <= 0) {
    for (int64_t i = 0; i < num_tasks; ++i) {
      task(i);
    }
    return;
  }
  Job job{&task, num_tasks, {}, static_cast<int>(num_helpers)};
  pool().run(job);
}

int num_pool_threads() {
  ThreadPool* existing = current_pool.load();
  return existing == nullptr ? 0 : existing->num_threads();
}

}  // namespace rlinf::comm
