#include "producer.h"

#include <climits>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "test_points.h"

namespace scout {
namespace {

[[noreturn]] void fail(const char* what, int64_t value, int64_t lo, int64_t hi, int64_t row = -1) {
  throw std::invalid_argument("post: " + std::string(what) + " " + std::to_string(value) +
                              (row >= 0 ? " of row " + std::to_string(row) : "") + " is outside " +
                              std::to_string(lo) + ".." + std::to_string(hi));
}

// Whether this can be a result of attention: no inf or NaN, except lse = -inf of a row without
// pages.
bool is_sound(const float* out, uint64_t values, const float* lse, uint64_t heads) {
  constexpr uint32_t kNotFinite = 0x7f800000u;
  uint32_t bad = 0, bits;
  for (uint64_t i = 0; i < values; ++i) {
    std::memcpy(&bits, out + i, sizeof bits);
    bad |= (bits & kNotFinite) == kNotFinite;
  }
  for (uint64_t i = 0; i < heads; ++i) bad |= !(lse[i] < INFINITY);
  return bad == 0;
}

}  // namespace

Producer::Producer(void* base, uint64_t bytes) {
  const std::string why = ring_.open(base, bytes);
  if (!why.empty()) throw std::invalid_argument("ring producer: " + why);
  slots_.resize(ring_.num_slots());
  // An arena may have several producers in succession. From here on the private copies of these
  // numbers are authoritative: a worker may corrupt the shared ones.
  posts_ = load_acquire(&ring_.control()->head);
  last_epoch_ = load_relaxed(&ring_.control()->epoch);
  // Records of the previous producer may still be served by a worker that outlived it.
  for (uint32_t i = 0; i < ring_.num_slots(); ++i)
    slots_[i].seq = load_acquire(&ring_.record(i)->seq);
  store_relaxed(&ring_.control()->trace, 0u);
}

uint32_t Producer::next_epoch() {
  const uint32_t epoch = last_epoch_.load(std::memory_order_relaxed) + 1;
  if (epoch >> 24 != 0) throw std::runtime_error("ring producer: epochs are used up");
  last_epoch_.store(epoch, std::memory_order_relaxed);
  store_relaxed(&ring_.control()->epoch, epoch);  // for the next producer
  return epoch;
}

void Producer::set_live_epoch(uint32_t epoch) {
  live_epoch_.store(epoch, std::memory_order_seq_cst);
  full_fence();  // either await_done sees the new epoch, or its waiter is seen here
  for (uint32_t i = 0; i < ring_.num_slots(); ++i) {
    const ReplyHeader* reply = ring_.reply(i);
    if (load_acquire(&reply->waiters) != 0) futex_wake(low_half(&reply->done), INT_MAX);
  }
}

uint64_t Producer::post(uint32_t layer, uint64_t step, uint32_t rows, const float* q,
                        const int32_t* pages, uint32_t k, const int32_t* n_pages, uint32_t splits) {
  const Header& h = ring_.header();
  if (layer >= h.num_layers) fail("layer", layer, 0, h.num_layers - 1);
  if (rows > h.max_batch) fail("rows", rows, 0, h.max_batch);
  if (splits > kMaxSplits) fail("splits", splits, 0, kMaxSplits);
  int64_t sequences = 0, listed = 0, largest = 0, total = 0;  // total: without padding
  for (uint32_t b = 0; b < rows; ++b) {
    const int64_t limit = k < h.max_pages ? k : h.max_pages;
    if (n_pages[b] < 0 || n_pages[b] > limit) fail("n_pages", n_pages[b], 0, limit, b);
    sequences += n_pages[b] > 0;
    listed += n_pages[b];
    largest = n_pages[b] > largest ? n_pages[b] : largest;
    for (int32_t i = 0; i < n_pages[b]; ++i) {
      const int32_t id = pages[uint64_t{b} * k + i];
      if (id >= id_end(h)) fail("page id", id, 0, id_end(h) - 1, b);
      total += id >= 0;
    }
  }
  const uint32_t index = ring_.slot(layer, step);
  Slot& slot = slots_[index];
  const uint32_t live = live_epoch_.load(std::memory_order_acquire);
  slot.ticket = ++tickets_;
  slot.rows = rows;
  slot.splits = splits > 0 ? splits : split_.splits(sequences, listed, largest);
  slot.pages = total;
  if (total == 0) {
    slot.kind = Kind::kEmpty;
  } else if (live == 0 || is_busy(index, live)) {
    slot.kind = Kind::kLocal;
    add_own<int64_t>(&local_tickets_, 1);
    const uint64_t count = slot.rows * ring_.q_floats();
    slot.q.resize(count * value_bytes(ring_.header()));
    ring_.store_values(q, count, slot.q.data());
    keep_ids(slot, pages, k, n_pages);
  } else {
    slot.kind = Kind::kPosted;
    keep_ids(slot, pages, k, n_pages);
    publish(index, live, layer, step, q, pages, k, n_pages);
  }
  return slot.ticket;
}

bool Producer::is_done(uint64_t ticket, uint32_t layer, uint64_t step) const {
  if (layer >= ring_.header().num_layers) return true;
  const uint32_t index = ring_.slot(layer, step);
  const Slot& slot = slots_[index];
  return slot.ticket != ticket || slot.kind == Kind::kEmpty ||
         (slot.kind == Kind::kPosted && load_acquire(&ring_.reply(index)->done) == slot.seq);
}

Producer::Reply Producer::wait(uint64_t ticket, uint32_t layer, uint64_t step, uint32_t rows,
                               int64_t timeout_us, int64_t spin_us, float* out, float* lse) {
  const Header& h = ring_.header();
  if (layer >= h.num_layers) fail("layer", layer, 0, h.num_layers - 1);
  const uint32_t index = ring_.slot(layer, step);
  Slot& slot = slots_[index];
  if (ticket == 0 || slot.ticket != ticket)
    throw std::runtime_error("wait: ticket " + std::to_string(ticket) + " of layer " +
                             std::to_string(layer) + " step " + std::to_string(step) +
                             " is used up: waited for before, or replaced by a later post");
  if (rows != slot.rows)
    throw std::invalid_argument("wait: out has " + std::to_string(rows) + " rows, expected " +
                                std::to_string(slot.rows));
  slot.ticket = 0;
  const uint64_t q_floats = ring_.q_floats();
  Reply reply{0, 0};
  if (slot.kind == Kind::kEmpty) {
    std::memset(out, 0, slot.rows * q_floats * sizeof(float));
    for (uint64_t i = 0; i < uint64_t{slot.rows} * h.row_heads; ++i) lse[i] = -INFINITY;
    return reply;
  }
  if (slot.kind == Kind::kPosted) {
    const int64_t begin_ns = now_ns();
    const bool answered = await_done(index, slot.seq, begin_ns, timeout_us, spin_us);
    reply.waited_us = (now_ns() - begin_ns) / 1000;
    if (answered) {
      SCOUT_POINT(kAnswered, index);
      const uint64_t values = slot.rows * q_floats, heads = uint64_t{slot.rows} * h.row_heads;
      ring_.load_values(ring_.out(index, 0), values, out);
      std::memcpy(lse, ring_.lse(index, 0), heads * sizeof(float));
      if (is_sound(out, values, lse, heads)) return reply;
      add_own<int64_t>(&refused_answers_, 1);
    }
    // No worker can write a record, so q is intact; the ids are checked copies.
    compute(layer, slot, ring_.q(index, 0), out, lse);
  } else {
    compute(layer, slot, slot.q.data(), out, lse);
  }
  reply.fallback_pages = slot.pages;
  add_own<int64_t>(&fallback_pages_, slot.pages);
  return reply;
}

bool Producer::is_busy(uint32_t index, uint32_t live) const {
  const uint64_t seq = slots_[index].seq;
  return seq != 0 && epoch_of(seq) == live && load_acquire(&ring_.reply(index)->done) != seq;
}

void Producer::keep_ids(Slot& slot, const int32_t* pages, uint32_t k, const int32_t* n_pages) {
  const uint64_t max_pages = ring_.header().max_pages;
  const uint64_t rows = slot.rows;
  if (slot.page_ids.size() < rows * max_pages) slot.page_ids.resize(rows * max_pages);
  slot.n_pages.assign(n_pages, n_pages + rows);
  for (uint64_t b = 0; b < rows; ++b)
    std::memcpy(&slot.page_ids[b * max_pages], pages + b * k, n_pages[b] * sizeof(int32_t));
}

void Producer::publish(uint32_t index, uint32_t live, uint32_t layer, uint64_t step, const float* q,
                       const int32_t* pages, uint32_t k, const int32_t* n_pages) {
  Slot& slot = slots_[index];
  RecordHeader* record = ring_.record(index);
  uint64_t* claim = ring_.reply(index)->claim;
  const uint64_t post = ++posts_;
  slot.seq = make_seq(live, post);
  const uint32_t nodes = ring_.header().num_nodes;
  for (uint32_t node = 0; node < nodes; ++node)
    store_relaxed(&claim[node], (post & kPostMask) << 24 | kClosed);
  full_fence();  // from here on no item of the previous record can be claimed
  SCOUT_POINT(kClosed, index);
  store_relaxed(&record->seq, slot.seq);
  store_relaxed(&record->layer, layer);
  store_relaxed(&record->rows, slot.rows);
  store_relaxed(&record->splits, slot.splits);
  store_relaxed(&record->step, step);
  SCOUT_POINT(kHeaderWritten, index);
  ring_.store_values(q, slot.rows * ring_.q_floats(), ring_.q(index, 0));
  for (uint32_t b = 0; b < slot.rows; ++b)
    std::memcpy(ring_.pages(index, b), pages + uint64_t{b} * k, n_pages[b] * sizeof(int32_t));
  std::memcpy(ring_.n_pages(index), n_pages, slot.rows * sizeof(int32_t));
  SCOUT_POINT(kDataWritten, index);
  for (uint32_t node = 0; node < nodes; ++node)
    store_release(&claim[node], (post & kPostMask) << 24);
  SCOUT_POINT(kOpened, index);
  store_release(ring_.log_entry(post), (post & kPostMask) << 24 | index);
  SCOUT_POINT(kLogged, index);
  store_release(&ring_.control()->head, post);
  SCOUT_POINT(kHeadRaised, index);
  Bell* bell = ring_.bell();
  __atomic_fetch_add(&bell->count, 1u, __ATOMIC_SEQ_CST);
  full_fence();
  SCOUT_POINT(kBellRaised, index);
  if (load_acquire(&bell->sleepers) != 0) {
    const uint64_t items = uint64_t{slot.rows} * slot.splits;  // of each node
    const int wanted = static_cast<int>(items < 1024 ? items : 1024);
    for (uint32_t node = 0; node < nodes; ++node) futex_wake(&bell->count, wanted, 1u << node);
  }
  SCOUT_POINT(kWoken, index);
}

bool Producer::await_done(uint32_t index, uint64_t seq, int64_t begin_ns, int64_t timeout_us,
                          int64_t spin_us) {
  constexpr int64_t kSliceUs = 10000;  // interval of checks of the live epoch
  ReplyHeader* reply = ring_.reply(index);
  const uint32_t epoch = static_cast<uint32_t>(epoch_of(seq));
  const int64_t spin_until_ns = begin_ns + spin_us * 1000;
  for (;;) {
    const uint64_t done = load_acquire(&reply->done);
    if (done == seq) return load_relaxed(&reply->status) == kReplyOk;
    if (live_epoch_.load(std::memory_order_acquire) != epoch)
      // The worker died. An answer completed just before still counts.
      return load_acquire(&reply->done) == seq && load_relaxed(&reply->status) == kReplyOk;
    const int64_t now = now_ns();
    if (now < spin_until_ns) {
      for (int i = 0; i < 32 && load_relaxed(&reply->done) != seq; ++i) cpu_pause();
      continue;
    }
    const int64_t left_us = timeout_us - (now - begin_ns) / 1000;
    if (left_us <= 0) {
      add_own<int64_t>(&late_tickets_, 1);
      return false;
    }
    store_relaxed(&reply->waiters, 1u);
    full_fence();
    SCOUT_POINT(kWaiting, index);
    if (load_acquire(&reply->done) == done && live_epoch_.load(std::memory_order_seq_cst) == epoch)
      futex_wait(low_half(&reply->done), static_cast<uint32_t>(done),
                 left_us < kSliceUs ? left_us : kSliceUs);
    store_relaxed(&reply->waiters, 0u);
  }
}

void Producer::compute(uint32_t layer, const Slot& slot, const char* q, float* out, float* lse) {
  const uint64_t q_floats = ring_.q_floats();
  const Header& h = ring_.header();
  const uint64_t row_bytes = q_floats * value_bytes(h);
  row_.resize(row_bytes);
  for (uint32_t b = 0; b < slot.rows; ++b) {
    if (row_attention_.attend(ring_, layer, b, q + b * row_bytes,
                              slot.page_ids.data() + uint64_t{b} * h.max_pages, slot.n_pages[b],
                              slot.splits, row_.data(), lse + uint64_t{b} * h.row_heads) < 0)
      throw std::runtime_error("wait: row " + std::to_string(b) + " has pages of two kinds");
    ring_.load_values(row_.data(), q_floats, out + b * q_floats);
  }
}

}  // namespace scout
