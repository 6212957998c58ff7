// The producer of the ring: the decode server's side. Posts records, takes replies, and computes a
// record itself if the worker is dead, late or busy. Protocol: ring.h.
//
// post and wait are for one thread only. set_live_epoch and the counters may be used from another.
#pragma once

#include <atomic>
#include <vector>

#include "mapped_ring.h"
#include "row.h"
#include "split.h"

namespace scout {

class Producer {
 public:
  struct Reply {
    int64_t waited_us;
    int64_t fallback_pages;  // pages computed here; 0 if the worker answered
  };

  Producer(void* base, uint64_t bytes);

  // Allocates the epoch of a new worker process; only call when all earlier ones are dead.
  uint32_t next_epoch();
  uint32_t last_epoch() const { return last_epoch_.load(std::memory_order_relaxed); }

  // From now on records go to the worker of `epoch`, or to nobody (0). Wakes waiters to re-check.
  void set_live_epoch(uint32_t epoch);

  // How post(splits = 0) splits; `max_splits`: as the worker was started with, up to kMaxSplits.
  void set_split(const Split& split) { split_ = split; }

  // Posts rows [0, rows), a multiple of the lists of a request, to the worker. Returns the ticket.
  // Copies everything. q fp32 [rows, row_heads, D], which a record may hold in 16 bits; pages int32
  // [rows, k], the first n_pages[b] of row b are valid, ids < 0 skipped; splits: per row and node,
  // 0: according to set_split. Throws std::invalid_argument for a value out of range (nothing is
  // posted then).
  uint64_t post(uint32_t layer, uint64_t step, uint32_t rows, const float* q, const int32_t* pages,
                uint32_t k, const int32_t* n_pages, uint32_t splits);

  // True if wait() would not sleep, so that the caller can keep the GIL.
  bool is_done(uint64_t ticket, uint32_t layer, uint64_t step) const;

  // Fills out fp32 [rows, row_heads, D] and lse fp32 [rows, row_heads], from the worker's reply if
  // it arrives within timeout_us, otherwise by computing the same pages here. Throws
  // std::invalid_argument for another number of rows than was posted, and std::runtime_error if the
  // ticket was already waited for or its slot was reused by a later one.
  Reply wait(uint64_t ticket, uint32_t layer, uint64_t step, uint32_t rows, int64_t timeout_us,
             int64_t spin_us, float* out, float* lse);

  const Ring& ring() const { return ring_; }
  // The epoch that records go to; 0: nobody.
  uint32_t live_epoch() const { return live_epoch_.load(std::memory_order_acquire); }
  int64_t fallback_pages() const { return load_relaxed(&fallback_pages_); }
  int64_t local_tickets() const { return load_relaxed(&local_tickets_); }
  int64_t late_tickets() const { return load_relaxed(&late_tickets_); }
  int64_t refused_answers() const { return load_relaxed(&refused_answers_); }

 private:
  enum class Kind { kEmpty, kLocal, kPosted };
  struct Slot {
    uint64_t ticket = 0;  // outstanding ticket, 0: none
    uint64_t seq = 0;     // last record published in this slot
    Kind kind = Kind::kEmpty;
    uint32_t rows = 0;
    uint32_t splits = 1;
    int64_t pages = 0;
    // Copies of the posted arguments that no worker can write; grow to the largest seen.
    std::vector<int32_t> page_ids;
    std::vector<int32_t> n_pages;
    std::vector<char> q;  // as in a record; only for local tickets
  };

  // Whether a live worker may still read the record or write the reply.
  bool is_busy(uint32_t index, uint32_t live) const;
  void keep_ids(Slot& slot, const int32_t* pages, uint32_t k, const int32_t* n_pages);
  void publish(uint32_t index, uint32_t live, uint32_t layer, uint64_t step, const float* q,
               const int32_t* pages, uint32_t k, const int32_t* n_pages);

  // True if the worker has answered `seq` with kReplyOk.
  bool await_done(uint32_t index, uint64_t seq, int64_t begin_ns, int64_t timeout_us,
                  int64_t spin_us);
  void compute(uint32_t layer, const Slot& slot, const char* q, float* out, float* lse);

  Ring ring_;
  std::vector<Slot> slots_;
  RowAttention row_attention_;
  std::vector<char> row_;  // of a result computed here, rounded as in a reply
  Split split_;
  uint64_t tickets_ = 0;
  uint64_t posts_ = 0;
  int64_t fallback_pages_ = 0;
  int64_t local_tickets_ = 0;
  int64_t late_tickets_ = 0;             // timeouts while the worker was alive
  int64_t refused_answers_ = 0;          // not finite, so not a result of attention
  std::atomic<uint32_t> last_epoch_{0};  // last one allocated
  std::atomic<uint32_t> live_epoch_{0};
};

}  // namespace scout
