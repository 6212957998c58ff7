#include "runtime.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <climits>
#include <cstdlib>
#include <stdexcept>

#include "test_points.h"

namespace scout {
namespace {

// Bounds the delay of a missed wake-up, which the protocol rules out.
constexpr int64_t kSleepUs = 500000;

// Signals are handled by the control thread: none may interrupt a pool thread.
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

}  // namespace

void Runtime::Freed::operator()(float* p) const { std::free(p); }

Runtime::Runtime(void* base, uint64_t bytes, const RuntimeOptions& options) : options_(options) {
  const std::string why = ring_.open(base, bytes);
  if (!why.empty()) throw std::runtime_error("CPU attention: " + why);
  const Header& h = ring_.header();
  if (options_.cpus.empty()) throw std::runtime_error("CPU attention: no CPUs given");
  if (options_.cpus.size() > h.stat_lines)
    throw std::runtime_error("CPU attention: " + std::to_string(options_.cpus.size()) +
                             " CPUs, the arena has room for " + std::to_string(h.stat_lines));
  if (options_.max_parts < 1 || options_.max_parts > kMaxParts)
    throw std::runtime_error("CPU attention: threads per group is " +
                             std::to_string(options_.max_parts) + ", allowed are 1 to " +
                             std::to_string(kMaxParts));
  check_nodes();
  most_parts_ = options_.max_parts * h.num_nodes;
  const uint64_t slots = ring_.num_slots();
  partial_floats_ = partial_floats(h.row_heads, h.head_dim);
  if (most_parts_ > 1) {
    // calloc maps fresh zero pages, which take no memory until written: only by runs with pages, of
    // rows that are split.
    const uint64_t bytes =
        partial_bytes(h.num_layers, h.max_batch, h.row_heads, h.head_dim, most_parts_);
    partials_.reset(static_cast<float*>(std::calloc(bytes, 1)));
    if (!partials_)
      throw std::runtime_error("CPU attention: no memory for " + std::to_string(bytes) +
                               " bytes of partial results");
    parts_done_.reset(new std::atomic<uint64_t>[slots * h.max_batch]());
  }
  rows_done_.reset(new std::atomic<uint64_t>[slots]());
  refused_.reset(new std::atomic<uint64_t>[slots]());
  first_post_ = load_acquire(&ring_.control()->head);
  store_relaxed(&ring_.bell()->sleepers, uint32_t{0});  // a previous worker may have died asleep
  for (size_t i = 0; i < options_.cpus.size(); ++i)
    ++node_threads_[options_.nodes.empty() ? 0 : options_.nodes[i]];
  try {
    for (uint32_t i = 0; i < options_.cpus.size(); ++i) start_thread(i, options_.cpus[i]);
  } catch (...) {
    stop();
    throw;
  }
}

Runtime::~Runtime() { stop(); }

void Runtime::check_nodes() const {
  const uint32_t count = ring_.header().num_nodes;
  if (!options_.nodes.empty() && options_.nodes.size() != options_.cpus.size())
    throw std::runtime_error("CPU attention: " + std::to_string(options_.nodes.size()) +
                             " nodes given for " + std::to_string(options_.cpus.size()) + " CPUs");
  for (int node : options_.nodes)
    if (node < 0 || static_cast<uint32_t>(node) >= count)
      throw std::runtime_error("CPU attention: node " + std::to_string(node) +
                               " of a CPU is outside 0.." + std::to_string(count - 1));
}

void Runtime::start_thread(uint32_t index, int cpu) {
  threads_.push_back(std::make_unique<Thread>());
  Thread& me = *threads_.back();
  const Header& h = ring_.header();
  me.stats = ring_.stats(index);
  me.node = options_.nodes.empty() ? 0 : static_cast<uint32_t>(options_.nodes[index]);
  me.pages.resize(h.max_pages);
  me.query.resize(ring_.q_floats());
  me.result.resize(partial_floats_);
  // Pinned before the thread runs, so that its stack is first touched on its own node.
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  cpu_set_t before;
  if (pthread_getaffinity_np(pthread_self(), sizeof(before), &before) != 0) CPU_ZERO(&before);
  const int rc = pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  if (rc != 0)
    throw std::runtime_error("CPU attention: cannot run on CPU " + std::to_string(cpu) +
                             " (offline, or outside this process's cpuset)");
  try {
    BlockSignals blocked;
    me.handle = std::thread([this, &me, index] { run(me, index); });
  } catch (...) {
    pthread_setaffinity_np(pthread_self(), sizeof(before), &before);
    throw std::runtime_error("CPU attention: cannot start thread " + std::to_string(index));
  }
  pthread_setaffinity_np(pthread_self(), sizeof(before), &before);
  const std::string name = "scout-cpu" + std::to_string(cpu);
  pthread_setname_np(me.handle.native_handle(), name.c_str());
}

void Runtime::stop() {
  // Only the first call touches the mapping, which may be gone by the time of the destructor.
  if (stopping_.exchange(true, std::memory_order_seq_cst)) return;
  Bell* bell = ring_.bell();
  __atomic_fetch_add(&bell->count, 1u, __ATOMIC_SEQ_CST);
  futex_wake(&bell->count, INT_MAX);
  for (auto& thread : threads_)
    if (thread->handle.joinable()) thread->handle.join();
}

Progress Runtime::progress() const {
  // From the slots rather than from counts of posts: a record of an earlier epoch, or one lost to
  // ring corruption, would stay in the difference of counts forever. A record that is being filled
  // already counts.
  uint64_t pending = 0;
  for (uint32_t slot = 0; slot < ring_.num_slots(); ++slot) {
    const uint64_t seq = load_acquire(&ring_.record(slot)->seq);
    pending += epoch_of(seq) == options_.epoch && load_acquire(&ring_.reply(slot)->done) != seq;
  }
  uint64_t items = 0;
  for (const auto& thread : threads_) items += load_relaxed(&thread->items);
  return {pending, items};
}

void Runtime::run(Thread& me, uint32_t index) {
  const Control* control = ring_.control();
  const uint64_t log_entries = ring_.header().log_entries;
  const int64_t spin_ns = options_.spin_us * 1000;
  uint64_t cursor = first_post_;  // the last post that this thread has visited
  int64_t last_work_ns = now_ns();
  while (!stopping_.load(std::memory_order_relaxed)) {
    const uint64_t head = load_acquire(&control->head);
    if (head != cursor) {
      // The head only moves backwards if the word is corrupted. Then this worker's posts are
      // visited again (all, if the head was already corrupted at start): a served record cannot be
      // claimed twice.
      if (head < cursor) cursor = head < first_post_ ? 0 : first_post_;
      if (cursor < first_post_ && first_post_ <= head) cursor = first_post_;
      if (head - cursor > log_entries) cursor = head - log_entries;  // see ring.h
      while (cursor != head && !stopping_.load(std::memory_order_relaxed))
        serve(me, index, ++cursor);
      last_work_ns = now_ns();
      continue;
    }
    for (int i = 0; i < 32 && load_relaxed(&control->head) == cursor; ++i) cpu_pause();
    if (load_relaxed(&control->head) == cursor && now_ns() - last_work_ns >= spin_ns) {
      sleep(me, cursor);
      // After a wake-up check the log once; if another thread took the work, sleep again.
    }
  }
}

void Runtime::sleep(const Thread& me, uint64_t cursor) {
  Bell* bell = ring_.bell();
  __atomic_fetch_add(&bell->sleepers, 1u, __ATOMIC_SEQ_CST);
  SCOUT_POINT(kGoingToSleep, UINT32_MAX);
  const uint32_t seen = load_acquire(&bell->count);
  full_fence();
  // The producer stores head, raises the bell, then reads sleepers: either it sees this sleeper and
  // wakes it, or its head is seen here (store-load fences on both sides).
  if (load_acquire(&ring_.control()->head) == cursor &&
      !stopping_.load(std::memory_order_seq_cst)) {
    SCOUT_POINT(kFallingAsleep, UINT32_MAX);
    if (ring_.header().num_nodes == 1)
      futex_wait(&bell->count, seen, kSleepUs);
    else
      futex_wait_group(&bell->count, seen, kSleepUs, 1u << me.node);
  }
  SCOUT_POINT(kAwake, UINT32_MAX);
  // More sleepers than threads: the word was corrupted. Too large a count costs a system call per
  // post; too small a count would delay posts by up to kSleepUs.
  const uint32_t threads = static_cast<uint32_t>(options_.cpus.size());
  if (__atomic_sub_fetch(&bell->sleepers, 1u, __ATOMIC_SEQ_CST) >= threads)
    store_relaxed(&bell->sleepers, threads);
}

}  // namespace scout
