#include "attendant.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <climits>

namespace scout {
namespace {

constexpr int64_t kIdleShare = 64;
constexpr int64_t kIdlePollUs = 1000;

}  // namespace

Attendant::Attendant(const Producer& producer, int64_t poll_us)
    : producer_(producer), ring_(producer.ring()), poll_us_(poll_us) {
  rung_ = load_acquire(&ring_.control()->head);
  const BlockSignals blocked;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "scout-attendant");
}

Attendant::~Attendant() { stop(); }

void Attendant::stop() {
  stopping_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
}

void Attendant::run() {
  int64_t busy_ns = now_ns();  // time of the last record
  while (!stopping_.load(std::memory_order_relaxed)) {
    const uint64_t head = load_acquire(&ring_.control()->head);
    const int64_t now = now_ns();
    if (head != rung_) {
      ring_bell(head);
      busy_ns = now;
    }
    answer_orphans(head);
    // Back off in proportion to the idle time: a record is delayed by at most poll_us, or if longer
    // by 1 / kIdleShare of it, up to kIdlePollUs.
    const int64_t pause_us =
        std::max(poll_us_, std::min((now - busy_ns) / 1000 / kIdleShare, kIdlePollUs));
    const timespec pause{pause_us / 1000000, (pause_us % 1000000) * 1000};
    nanosleep(&pause, nullptr);
  }
}

void Attendant::ring_bell(uint64_t head) {
  Bell* bell = ring_.bell();
  rung_ = head;
  __atomic_fetch_add(&bell->count, 1u, __ATOMIC_SEQ_CST);
  full_fence();
  if (load_acquire(&bell->sleepers) != 0) futex_wake(&bell->count, INT_MAX);
}

void Attendant::answer_orphans(uint64_t head) {
  const uint32_t live = producer_.live_epoch();
  for (uint32_t slot = 0; slot < ring_.num_slots(); ++slot) {
    const uint64_t seq = load_acquire(&ring_.record(slot)->seq);
    // A record beyond the head is still being written.
    if (seq == 0 || epoch_of(seq) == live || post_of(seq) > head) continue;
    ReplyHeader* reply = ring_.reply(slot);
    if (load_acquire(&reply->done) == seq) continue;
    // A worker that is about to be killed may write the same rows concurrently, but the same bytes,
    // as both compute the same pages with the same split.
    const int64_t pages = compute(slot);
    if (pages > 0) pages_.fetch_add(pages, std::memory_order_relaxed);
    store_relaxed(&reply->status, static_cast<uint32_t>(pages < 0 ? kReplyRefused : kReplyOk));
    store_release(&reply->done, seq);
  }
}

int64_t Attendant::compute(uint32_t slot) {
  const Header& h = ring_.header();
  const RecordHeader* record = ring_.record(slot);
  const uint32_t layer = load_relaxed(&record->layer);
  const uint32_t rows = load_relaxed(&record->rows);
  const uint32_t splits = load_relaxed(&record->splits);
  if (layer >= h.num_layers || rows < 1 || rows > h.max_batch || splits < 1 || splits > kMaxSplits)
    return -1;
  int64_t total = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    const int64_t pages =
        row_attention_.attend(ring_, layer, row, ring_.q(slot, row), ring_.pages(slot, row),
                              load_relaxed(ring_.n_pages(slot) + row), splits, ring_.out(slot, row),
                              ring_.lse(slot, row));
    if (pages < 0) return -1;
    total += pages;
  }
  return total;
}

}  // namespace scout
