#include "runtime.h"

#include <pthread.h>
#include <sched.h>

#include <climits>
#include <cstdlib>
#include <stdexcept>

#include "row.h"
#include "split.h"
#include "test_points.h"
#include "thread_reports.h"

namespace scout {
namespace {

// Bounds the delay of a missed wake-up, which the protocol rules out.
constexpr int64_t kSleepUs = 500000;

// Increments the counter of the record with this tag (its post << 24) and returns the new count. A
// stale count, left by a record that was corrupted while served, is discarded by its other tag.
uint32_t count_one(std::atomic<uint64_t>& word, uint64_t tag) {
  uint64_t seen = word.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t next = ((seen & ~kItemMask) == tag ? seen : tag) + 1;
    if (word.compare_exchange_weak(seen, next, std::memory_order_acq_rel,
                                   std::memory_order_relaxed))
      return static_cast<uint32_t>(next & kItemMask);
  }
}

}  // namespace

Runtime::Runtime(void* base, uint64_t bytes, const RuntimeOptions& options) : options_(options) {
  const std::string why = ring_.open(base, bytes);
  if (!why.empty()) throw std::runtime_error("CPU attention: " + why);
  const Header& h = ring_.header();
  if (options_.cpus.size() > h.stat_lines)
    throw std::runtime_error("CPU attention: " + std::to_string(options_.cpus.size()) +
                             " CPUs, the arena has room for " + std::to_string(h.stat_lines));
  max_splits_ = options_.max_splits * h.num_nodes;
  const uint64_t slots = ring_.num_slots();
  partial_floats_ = partial_floats(h.row_heads, h.head_dim);
  if (max_splits_ > 1) {
    // calloc maps fresh zero pages, which take no memory until written: only by splits with pages,
    // of rows that are split.
    const uint64_t bytes =
        partial_bytes(h.num_layers, h.max_batch, h.row_heads, h.head_dim, max_splits_);
    partials_.reset(static_cast<float*>(std::calloc(bytes, 1)));
    if (!partials_)
      throw std::runtime_error("CPU attention: no memory for " + std::to_string(bytes) +
                               " bytes of partial results");
    splits_done_.reset(new std::atomic<uint64_t>[slots * h.max_batch]());
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
    futex_wait(&bell->count, seen, kSleepUs, 1u << me.node);
  }
  SCOUT_POINT(kAwake, UINT32_MAX);
  // More sleepers than threads: the word was corrupted. Too large a count costs a system call per
  // post; too small a count would delay posts by up to kSleepUs.
  const uint32_t threads = static_cast<uint32_t>(options_.cpus.size());
  if (__atomic_sub_fetch(&bell->sleepers, 1u, __ATOMIC_SEQ_CST) >= threads)
    store_relaxed(&bell->sleepers, threads);
}

void Runtime::serve(Thread& me, uint32_t index, uint64_t post) {
  me.span.items = 0;
  serve_record(me, index, post);
  if (me.span.items != 0 && load_relaxed(&ring_.control()->trace) != 0)
    write_event(ring_, index, me.span);
}

void Runtime::serve_record(Thread& me, uint32_t index, uint64_t post) {
  const uint64_t entry = load_acquire(ring_.log_entry(post));
  if (entry >> 24 != (post & kPostMask)) return;  // overwritten, hence already finished
  const uint32_t slot = static_cast<uint32_t>(entry & kItemMask);
  if (slot >= ring_.num_slots()) {
    // There is no claim word to arbitrate: by convention thread 0 counts it.
    if (index == 0) add_own<uint64_t>(&me.stats->refused, 1);
    return;
  }
  SCOUT_POINT(kEntryRead, slot);
  serve_node(me, slot, post, me.node, 0);
  const uint32_t nodes = ring_.header().num_nodes;
  if (nodes == 1) return;
  const int64_t help_ns = now_ns() + options_.help_after_us * 1000;
  for (uint32_t i = 1; i < nodes; ++i) {
    const uint32_t node = (me.node + i) % nodes;
    serve_node(me, slot, post, node, node_threads_[node] > 0 ? help_ns : 0);
  }
}

// Takes items of one node, one at a time, not before `not_before_ns`, until all are claimed.
void Runtime::serve_node(Thread& me, uint32_t slot, uint64_t post, uint32_t node,
                         int64_t not_before_ns) {
  const Header& h = ring_.header();
  const RecordHeader* record = ring_.record(slot);
  uint64_t* claims = ring_.reply(slot)->claim;
  const uint64_t tag = (post & kPostMask) << 24;
  for (;;) {
    uint64_t claim = load_acquire(&claims[node]);
    if ((claim & ~kItemMask) != tag || claim == (tag | kClosed)) return;
    // Acquire: a thread that sees a word of a later record here also sees that this one was closed,
    // and its CAS below fails.
    const uint64_t seq = load_acquire(&record->seq);
    const uint32_t layer = load_acquire(&record->layer);
    const uint32_t rows = load_acquire(&record->rows);
    const uint32_t splits = load_acquire(&record->splits);
    const uint64_t step = load_acquire(&record->step);
    SCOUT_POINT(kHeaderRead, slot);
    const bool own = epoch_of(seq) == options_.epoch;
    const bool valid = seq == make_seq(options_.epoch, post) && layer < h.num_layers &&
                       slot % h.num_layers == layer && rows >= 1 && rows <= h.max_batch &&
                       splits >= 1 && splits <= options_.max_splits;
    if (!own || !valid) {
      // The thread that closes the first claim counts the record, and notifies the producer, using
      // the post number on which log and claim agree.
      uint64_t first = load_acquire(&claims[0]);
      if ((first & ~kItemMask) != tag || first == (tag | kClosed)) return;
      if (!__atomic_compare_exchange_n(&claims[0], &first, tag | kClosed, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE))
        continue;
      add_own<uint64_t>(own ? &me.stats->refused : &me.stats->stale, 1);
      if (own) publish_done(slot, make_seq(options_.epoch, post), kReplyRefused);
      add_own<uint64_t>(&me.stats->records, 1);
      return;
    }
    const uint64_t item = claim & kItemMask;
    if (item >= uint64_t{rows} * splits) return;
    if (not_before_ns != 0 && now_ns() < not_before_ns) {
      if (stopping_.load(std::memory_order_relaxed)) return;
      for (int i = 0; i < 32 && load_relaxed(&claims[node]) == claim; ++i) cpu_pause();
      continue;
    }
    // Success implies that the slot was not refilled since `claim` was read, so the header belongs
    // to this record.
    if (!__atomic_compare_exchange_n(&claims[node], &claim, claim + 1, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
      continue;
    SCOUT_POINT(kItemClaimed, slot);
    const uint32_t row = static_cast<uint32_t>(item / splits);
    const uint32_t split = node * splits + static_cast<uint32_t>(item % splits);
    if (me.span.items == 0) {
      me.span.seq = seq;
      me.span.step = step;
      me.span.layer = layer;
      me.span.first_item = row * h.num_nodes * splits + split;
      me.span.splits = splits;
      me.span.pages = 0;
    }
    run_item(me, slot, seq, layer, row, rows, split, splits);
  }
}

// Rows with pages before this one. Corruption may make two rows share a place, never leave memory.
uint32_t Runtime::place_of(uint32_t slot, uint32_t row) const {
  const int32_t* n_pages = ring_.n_pages(slot);
  uint32_t before = 0;
  for (uint32_t i = 0; i < row; ++i) before += load_relaxed(n_pages + i) != 0;
  return before;
}

void Runtime::run_item(Thread& me, uint32_t slot, uint64_t seq, uint32_t layer, uint32_t row,
                       uint32_t rows, uint32_t split, uint32_t splits) {
  const Header& h = ring_.header();
  const int64_t begin_ns = now_ns();
  const uint32_t row_splits = splits * h.num_nodes;
  const int32_t n = load_relaxed(ring_.n_pages(slot) + row);
  const bool merged = row_splits > 1 && n != 0;
  const uint32_t place = merged ? place_of(slot, row) : 0;
  float* out = merged ? partial(slot, place, split, row_splits) : me.result.data();
  const int32_t attended =
      attend_split(ring_, layer, row, ring_.q(slot, row), ring_.pages(slot, row), n, split, splits,
                   me.pages.data(), me.query.data(), out, out + ring_.q_floats());
  const bool refused = attended < 0;
  const uint64_t tag = post_of(seq) << 24;
  if (refused) refused_[slot].store(tag | 1, std::memory_order_relaxed);
  SCOUT_POINT(kItemComputed, slot);
  bool last = true;
  if (row_splits > 1) {
    last = count_one(splits_done_[uint64_t{slot} * h.max_batch + row], tag) == row_splits;
    if (last && merged) {
      merge_splits(h.row_heads, h.head_dim, row_splits, partial(slot, place, 0, row_splits),
                   partial_floats_, me.result.data(), me.result.data() + ring_.q_floats());
    } else if (last) {
      std::memset(out, 0, ring_.q_floats() * sizeof(float));
    }
  }
  // The slot belongs to this record until done is stored; the check guards against a producer that
  // violates this.
  if (last && !refused && load_acquire(&ring_.record(slot)->seq) == seq) {
    ring_.store_values(me.result.data(), ring_.q_floats(), ring_.out(slot, row));
    std::memcpy(ring_.lse(slot, row), me.result.data() + ring_.q_floats(),
                h.row_heads * sizeof(float));
    SCOUT_POINT(kRowWritten, slot);
  }
  add_own<uint64_t>(&me.stats->items, 1);
  add_own<uint64_t>(&me.items, 1);
  const int64_t end_ns = now_ns();
  if (!refused) {
    add_own<uint64_t>(&me.stats->pages, static_cast<uint64_t>(attended));
    if (split / splits != me.node)
      add_own<uint64_t>(&me.stats->remote_pages, static_cast<uint64_t>(attended));
    me.span.pages += static_cast<uint32_t>(attended);
  }
  add_own<uint64_t>(&me.stats->busy_ns, static_cast<uint64_t>(end_ns - begin_ns));
  if (me.span.items++ == 0) me.span.begin_ns = begin_ns;
  me.span.end_ns = end_ns;
  if (last) finish_row(me, slot, seq, rows);
}

void Runtime::finish_row(Thread& me, uint32_t slot, uint64_t seq, uint32_t rows) {
  const uint64_t tag = post_of(seq) << 24;
  if (count_one(rows_done_[slot], tag) != rows) return;
  SCOUT_POINT(kAllRowsWritten, slot);
  const bool refused = refused_[slot].load(std::memory_order_relaxed) == (tag | 1);
  if (refused) add_own<uint64_t>(&me.stats->refused, 1);
  add_own<uint64_t>(&me.stats->records, 1);
  if (load_acquire(&ring_.record(slot)->seq) != seq) return;  // as in run_item
  publish_done(slot, seq, refused ? kReplyRefused : kReplyOk);
}

void Runtime::publish_done(uint32_t slot, uint64_t seq, ReplyStatus status) {
  ReplyHeader* reply = ring_.reply(slot);
  store_relaxed(&reply->status, static_cast<uint32_t>(status));
  SCOUT_POINT(kStatusWritten, slot);
  store_release(&reply->done, seq);
  full_fence();
  SCOUT_POINT(kDone, slot);
  if (load_relaxed(&reply->waiters) != 0) futex_wake(low_half(&reply->done), INT_MAX);
}

}  // namespace scout
