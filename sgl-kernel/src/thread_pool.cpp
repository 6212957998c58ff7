#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "shared_words.h"

namespace scout {
namespace {

// How long a thread spins before it sleeps. Calls come in quick succession within a decode step,
// and waking a thread costs as much as attention over several pages.
constexpr std::chrono::microseconds kSpin{100};

// Spins until `ready` or for kSpin.
template <typename Ready>
void spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
}

// The scheduler often places a woken thread on its waker's core although another one is idle, and
// leaves it there for longer than a call takes. So a helper on the caller's core migrates away.
class Place {
 public:
  Place() {
    CPU_ZERO(&allowed_);
    known_ = pthread_getaffinity_np(pthread_self(), sizeof allowed_, &allowed_) == 0;
  }

  void leave(int cpu) {
    if (!known_ || cpu < 0 || cpu >= CPU_SETSIZE || sched_getcpu() != cpu) return;
    cpu_set_t others = allowed_;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) > 0) pthread_setaffinity_np(pthread_self(), sizeof others, &others);
  }

 private:
  cpu_set_t allowed_;
  bool known_;
};

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
      caller_cpu_ = sched_getcpu();
      next_.store(0, std::memory_order_relaxed);
      seats_.store(std::min(helpers, started_), std::memory_order_relaxed);
      if (sleepers_ > 0) wake_.notify_all();
    }
    take_tasks(fn, tasks);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      seats_.store(0, std::memory_order_relaxed);  // helpers may no longer join
    }
    spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return running_.load(std::memory_order_relaxed) == 0; });
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
    Place place;
    for (;;) {
      spin_until([this] { return seats_.load(std::memory_order_relaxed) > 0; });
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      wake_.wait(lock, [this] { return seats_.load(std::memory_order_relaxed) > 0; });
      --sleepers_;
      seats_.fetch_sub(1, std::memory_order_relaxed);
      running_.fetch_add(1, std::memory_order_relaxed);
      const std::function<void(int)>& fn = *fn_;
      const int tasks = tasks_;
      const int caller_cpu = caller_cpu_;
      lock.unlock();
      place.leave(caller_cpu);
      take_tasks(fn, tasks);
      lock.lock();
      if (running_.fetch_sub(1, std::memory_order_release) == 1) idle_.notify_one();
    }
  }

  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::atomic<int> next_{0};
  const std::function<void(int)>* fn_ = nullptr;
  int tasks_ = 0;
  int caller_cpu_ = -1;
  // Modified under the mutex, polled without it.
  std::atomic<int> seats_{0};    // helpers that may still join the current call
  std::atomic<int> running_{0};  // helpers inside the current call
  int sleepers_ = 0;
  int started_ = 0;
};

constexpr int kMaxThreads = 256;
std::atomic<pid_t> holder{0};  // process whose thread is inside a call, 0: none
Pool* pool = nullptr;          // never destroyed: its threads outlive static destruction

// False while another thread of this process is inside a call. A holder inherited by fork is
// ignored, as the parent's thread does not exist in the child.
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
