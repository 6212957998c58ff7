// The consumer of the ring: the CPU attention worker's threads. Protocol: ring.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mapped_ring.h"

namespace scout {

struct RuntimeOptions {
  uint32_t epoch = 1;       // of this process; records of any other are refused
  std::vector<int> cpus;    // one thread pinned to each
  std::vector<int> nodes;   // of each CPU, 0..num_nodes-1 of the header; empty: all 0
  int64_t spin_us = 50;     // how long an idle thread spins before it sleeps
  uint32_t max_splits = 1;  // most threads of a node on one sequence
  // Delay before threads steal items of another node. Waking one of its threads takes half of this.
  int64_t help_after_us = 50;
};

// Size of one split's result of one sequence: out and lse, rounded up to whole cache lines.
inline uint64_t partial_floats(uint32_t q_heads, uint32_t head_dim) {
  return (uint64_t{q_heads} * (head_dim + 1) + 31) / 32 * 32;
}

// Memory for partial results of sequences in up to `splits` splits, over all nodes.
inline uint64_t partial_bytes(uint32_t num_layers, uint32_t max_batch, uint32_t q_heads,
                              uint32_t head_dim, uint32_t splits) {
  const uint64_t rows = uint64_t{2} * num_layers * max_batch;
  return splits > 1 ? rows * splits * partial_floats(q_heads, head_dim) * sizeof(float) : 0;
}

// The worker's own view of its progress, for heartbeats.
struct Progress {
  uint64_t pending;  // records published but not finished
  uint64_t items;    // computed by this process
};

// Threads that serve the ring from construction until stop(). Every thread visits all posts in
// order; items (row, split) are claimed one at a time, so a sequence is served by up to as many
// threads as it has splits. A thread takes items of its own node first, and steals those of another
// node only when they have been unclaimed for a while. The loop allocates nothing, takes no locks
// and never enters Python.
class Runtime {
 public:
  // Throws std::runtime_error if the memory is not a ring or a CPU cannot be used. The caller
  // checks the other options.
  Runtime(void* base, uint64_t bytes, const RuntimeOptions& options);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Stops the threads after their current item; remaining records stay unanswered. Idempotent.
  void stop();
  Progress progress() const;

 private:
  struct Thread {
    std::thread handle;
    StatLine* stats = nullptr;
    uint32_t node = 0;
    std::vector<int32_t> pages;  // checked page ids of the current item
    std::vector<float> query;    // of the current item
    std::vector<float> result;   // out and lse of one row, before they are copied to the reply
    Event span{};                // its work on the current record, accumulated
    // Totals of this process only; the StatLine continues across epochs.
    alignas(128) uint64_t items = 0;
  };

  void start_thread(uint32_t index, int cpu);
  void run(Thread& me, uint32_t index);
  void serve(Thread& me, uint32_t index, uint64_t post);
  void serve_record(Thread& me, uint32_t index, uint64_t post);
  void serve_node(Thread& me, uint32_t slot, uint64_t post, uint32_t node, int64_t not_before_ns);
  void run_item(Thread& me, uint32_t slot, uint64_t seq, uint32_t layer, uint32_t row,
                uint32_t rows, uint32_t split, uint32_t splits);  // splits: of one node
  void finish_row(Thread& me, uint32_t slot, uint64_t seq, uint32_t rows);
  void publish_done(uint32_t slot, uint64_t seq, ReplyStatus status);
  void sleep(const Thread& me, uint64_t cursor);

  uint32_t place_of(uint32_t slot, uint32_t row) const;

  // Split `split` of `splits` (over all nodes) of the row with index `place` among those with
  // pages. Packed densely per record, so that records with few rows in many splits and with many
  // rows in few splits reuse the same memory.
  float* partial(uint32_t slot, uint32_t place, uint32_t split, uint32_t splits) const {
    const uint64_t first = uint64_t{slot} * ring_.header().max_batch * max_splits_;
    return partials_.get() + (first + uint64_t{place} * splits + split) * partial_floats_;
  }

  Ring ring_;
  RuntimeOptions options_;
  uint64_t first_post_ = 0;  // posts up to this one belong to earlier epochs
  uint64_t partial_floats_ = 0;
  uint32_t max_splits_ = 0;  // of a row, over all nodes
  uint32_t node_threads_[kMaxNodes] = {};
  std::unique_ptr<float[], void (*)(void*)> partials_{nullptr,
                                                      std::free};  // only with max_splits_ > 1
  // Each tagged with its record, see count_one.
  std::unique_ptr<std::atomic<uint64_t>[]> splits_done_;  // [slots * max_batch]
  std::unique_ptr<std::atomic<uint64_t>[]> rows_done_;    // [slots]
  std::unique_ptr<std::atomic<uint64_t>[]> refused_;  // [slots]: some row of the record was refused
  std::vector<std::unique_ptr<Thread>> threads_;
  std::atomic<bool> stopping_{false};
};

}  // namespace scout
