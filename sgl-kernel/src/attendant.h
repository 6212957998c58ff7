// A thread of the decode server that stands by a ring whose producer is a CUDA stream.
//
// A kernel can publish a record, but it cannot wake a futex, and while it waits for an answer it
// cannot find out that the worker has died and compute the pages itself. The attendant does both:
// it rings the bell for what a kernel has posted, and it answers records that no living worker
// will. It makes no CUDA call, so a stream that waits for it can always go on.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "producer.h"
#include "row.h"

namespace scout {

class Attendant {
 public:
  // `producer` says which epoch has a worker (set_live_epoch); it stays valid until stop(). Looks
  // at the ring every `poll_us`, and less often where nothing was posted for long.
  Attendant(const Producer& producer, int64_t poll_us);
  ~Attendant();
  Attendant(const Attendant&) = delete;
  Attendant& operator=(const Attendant&) = delete;

  // Ends the thread. Idempotent.
  void stop();
  // Pages of records that were answered here.
  int64_t pages() const { return pages_.load(std::memory_order_relaxed); }

 private:
  void run();
  void ring_bell(uint64_t head);
  void answer_orphans(uint64_t head);
  // Computes a record into its reply. Returns its pages, or -1 if the record is not sound.
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
