// A thread of the decode server that assists a ring whose producer is a CUDA stream.
//
// A kernel can neither wake a futex nor compute the pages itself if the worker dies. The attendant
// rings the bell for records posted by a kernel, and answers records that no live worker will. It
// makes no CUDA calls, so a stream that waits for it cannot deadlock.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "producer.h"
#include "row.h"

namespace scout {

class Attendant {
 public:
  // `producer` provides the live epoch (set_live_epoch) and must outlive stop(). Polls the ring
  // every `poll_us`, backing off while nothing is posted.
  Attendant(const Producer& producer, int64_t poll_us);
  ~Attendant();
  Attendant(const Attendant&) = delete;
  Attendant& operator=(const Attendant&) = delete;

  // Stops the thread. Idempotent.
  void stop();
  // Pages of records answered here.
  int64_t pages() const { return pages_.load(std::memory_order_relaxed); }

 private:
  void run();
  void ring_bell(uint64_t head);
  void answer_orphans(uint64_t head);
  // Computes a record into its reply. Returns its pages, or -1 if the record is invalid.
  int64_t compute(uint32_t slot);

  const Producer& producer_;
  const Ring& ring_;
  const int64_t poll_us_;
  uint64_t rung_ = 0;
  RowAttention row_attention_;
  std::atomic<int64_t> pages_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace scout
