#include "thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace scout {
namespace {

class Pool {
 public:
  Pool() : owner_(getpid()) {}

  pid_t owner() const { return owner_; }

  void run(int tasks, int helpers, const std::function<void(int)>& fn) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      fn_ = &fn;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      seats_ = std::min(helpers, started_);
      running_ = 0;
    }
    wake_.notify_all();
    take_tasks(fn, tasks);
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // who has not come by now need not come
    idle_.wait(lock, [this] { return running_ == 0; });
    fn_ = nullptr;
  }

 private:
  void grow(int threads) {
    while (started_ < threads) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // fewer helpers, same result
      }
      ++started_;
    }
  }

  void take_tasks(const std::function<void(int)>& fn, int tasks) {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) fn(i);
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return seats_ > 0; });
      --seats_;
      ++running_;
      const std::function<void(int)>& fn = *fn_;
      const int tasks = tasks_;
      lock.unlock();
      take_tasks(fn, tasks);
      lock.lock();
      if (--running_ == 0) idle_.notify_one();
    }
  }

  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::atomic<int> next_{0};
  const std::function<void(int)>* fn_ = nullptr;
  int tasks_ = 0;
  int seats_ = 0;    // helpers that may still join the current call
  int running_ = 0;  // helpers inside the current call
  int started_ = 0;
};

constexpr int kMaxThreads = 256;
std::atomic<pid_t> holder{0};  // process whose thread is inside a call, 0: nobody
Pool* pool = nullptr;          // never destroyed: its threads outlive static destruction

// False while another thread of this process is inside a call. A parent's thread that was inside
// when the process forked does not exist in the child.
bool acquire() {
  const pid_t self = getpid();
  pid_t found = 0;
  while (!holder.compare_exchange_strong(found, self, std::memory_order_acquire)) {
    if (found == self) return false;
  }
  return true;
}

}  // namespace

void parallel_for(int tasks, int threads, const std::function<void(int)>& fn) {
  const int useful = std::min({tasks, threads, kMaxThreads});
  if (useful <= 1 || !acquire()) {
    for (int i = 0; i < tasks; ++i) fn(i);
    return;
  }
  if (pool == nullptr || pool->owner() != getpid()) pool = new Pool;
  pool->run(tasks, useful - 1, fn);
  holder.store(0, std::memory_order_release);
}

}  // namespace scout
