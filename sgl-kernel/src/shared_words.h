// Primitives for memory shared by two processes: ordered loads and stores, futexes, time, signals.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

namespace scout {

template <class T>
inline T load_relaxed(const T* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T>
inline T load_acquire(const T* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <class T>
inline void store_relaxed(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
template <class T>
inline void store_release(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
// For single-writer words: only the calling thread writes *p.
template <class T>
inline void add_own(T* p, T v) {
  store_relaxed(p, load_relaxed(p) + v);
}
inline void full_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void cpu_pause() { __builtin_ia32_pause(); }

// While it lives, threads start with all signals blocked: those are for the process's main thread.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

 private:
  sigset_t old_;
};

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Sleeps while *word == seen, at most timeout_us. May wake spuriously: callers must re-check.
// Sleepers may be in groups, one per bit; futex_wake wakes up to `count` of the given groups.
constexpr uint32_t kAnyGroup = ~0u;
inline void futex_wait(const uint32_t* word, uint32_t seen, int64_t timeout_us,
                       uint32_t group = kAnyGroup) {
  const int64_t until_ns = now_ns() + timeout_us * 1000;  // FUTEX_WAIT_BITSET timeouts are absolute
  timespec t{static_cast<time_t>(until_ns / 1000000000), static_cast<long>(until_ns % 1000000000)};
  syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &t, nullptr, group);
}
inline void futex_wake(const uint32_t* word, int count, uint32_t groups = kAnyGroup) {
  syscall(SYS_futex, word, FUTEX_WAKE_BITSET, count, nullptr, nullptr, groups);
}
// The half of a 64-bit word in which consecutive posts always differ.
inline const uint32_t* low_half(const uint64_t* word) {
  return reinterpret_cast<const uint32_t*>(word);
}

}  // namespace scout
