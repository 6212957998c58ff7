// How fast this machine reads the bytes that attention reads, for benchmark/kernels/cpu_attention.py.
// Compiled by read_loop.py for the machine at hand. Every 64-byte line is loaded once and folded into a
// register; nothing is stored but one checksum, by which the caller knows that all was read.
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// A GCC and Clang vector of one cache line; the compiler maps it to the widest registers there are.
typedef uint64_t Line __attribute__((vector_size(64), aligned(64)));
constexpr int64_t kLineBytes = 64;
constexpr int64_t kStripeLines = 8;  // loads in flight that do not wait for each other
constexpr int64_t kAheadBytes = 2048;  // of software prefetch: the fastest of 0 to 4096 on AMD EPYCs

// XOR of all lines of [p, p + bytes); bytes is a multiple of 512.
inline void fold(const char* p, int64_t bytes, Line (&acc)[kStripeLines]) {
  for (int64_t i = 0; i < bytes; i += kStripeLines * kLineBytes) {
    const Line* line = reinterpret_cast<const Line*>(p + i);
    for (int j = 0; j < kStripeLines; ++j) __builtin_prefetch(p + i + kAheadBytes + j * kLineBytes);
    for (int j = 0; j < kStripeLines; ++j) acc[j] ^= line[j];
  }
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // best effort
}

}  // namespace

extern "C" {

// Reads K and V of pages ids[0..n), in this order: K of a page, then its V. page_bytes is a multiple of 512. Each of
// `cpus` takes the next page. Returns the nanoseconds from the moment all threads stand ready to the moment the last
// one is through.
int64_t scout_read_pages(const char* k, const char* v, int64_t page_bytes, const int32_t* ids, int64_t n,
                         const int32_t* cpus, int32_t threads, uint64_t* checksum) {
  std::atomic<int64_t> next{0}, last_ns{0};
  std::atomic<int32_t> ready{0};
  std::atomic<bool> go{false};
  std::atomic<uint64_t> all{0};
  auto body = [&](int32_t t) {
    pin(cpus[t]);
    ready.fetch_add(1);
    while (!go.load(std::memory_order_acquire)) {
    }
    Line acc[kStripeLines] = {};
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      fold(k + ids[i] * page_bytes, page_bytes, acc);
      fold(v + ids[i] * page_bytes, page_bytes, acc);
    }
    const int64_t end_ns = now_ns();
    int64_t last = last_ns.load();
    while (last < end_ns && !last_ns.compare_exchange_weak(last, end_ns)) {
    }
    for (const Line& line : acc) {
      for (int w = 0; w < 8; ++w) all.fetch_xor(line[w]);
    }
  };
  std::vector<std::thread> pool;
  for (int32_t t = 0; t < threads; ++t) pool.emplace_back(body, t);
  while (ready.load() < threads) std::this_thread::yield();
  const int64_t begin_ns = now_ns();
  go.store(true, std::memory_order_release);
  for (std::thread& t : pool) t.join();
  *checksum = all.load();
  return last_ns.load() - begin_ns;
}
}
