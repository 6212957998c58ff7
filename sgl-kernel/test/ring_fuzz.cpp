// Damaged headers, damaged records and words that change under the runtime's hands. What must hold:
// no crash, no access outside what the header describes (guard pages, address sanitizer), no hang,
// what can be told to be wrong is refused and counted, and what comes after is answered right.
#include <unistd.h>

#include <atomic>
#include <climits>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>

#include "producer.h"
#include "ring_arena.h"
#include "runtime.h"

namespace ring_test {
namespace {

constexpr uint32_t kSlots = 2 * kLayers;
unsigned long long u(uint64_t x) { return x; }  // for printf

constexpr int64_t kPatienceUs = 60'000'000;

uint64_t odd_number(Rng& rng) {
  static constexpr uint64_t kOdd[] = {0,
                                      1,
                                      2,
                                      3,
                                      7,
                                      16,
                                      17,
                                      64,
                                      127,
                                      128,
                                      4095,
                                      4096,
                                      1u << 16,
                                      (1u << 20) + 1,
                                      INT32_MAX,
                                      1ull << 31,
                                      UINT32_MAX,
                                      1ull << 32,
                                      scout::kPostMask,
                                      1ull << 62,
                                      1ull << 63,
                                      UINT64_MAX};
  const uint64_t roll = rng();
  if (roll % 4 == 0) return rng() >> rng() % 64;
  return kOdd[roll / 4 % (sizeof kOdd / sizeof *kOdd)] + (roll / 1024 % 8 == 0 ? rng() % 5 - 2 : 0);
}

// ---- headers ------------------------------------------------------------------------------------

bool lies_within(const scout::Ring& ring, const char* base, uint64_t bytes) {
  const scout::Header& h = ring.header();
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base);
  auto in = [&](const void* at, uint64_t size) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(at);
    return p >= begin && p - begin <= bytes && size <= bytes - (p - begin);
  };
  const uint64_t row = ring.q_floats() * 4;
  bool ok = in(ring.control(), sizeof(scout::Control)) &&
            in(ring.log_entry(0), 8ull * h.log_entries) && in(ring.stats(0), 0) &&
            in(ring.stats(h.stat_lines - 1), sizeof(scout::StatLine)) && in(ring.event(0, 0), 0) &&
            in(ring.event(h.stat_lines - 1, h.event_entries - 1), sizeof(scout::Event));
  for (uint32_t slot : {0u, ring.num_slots() - 1}) {
    ok = ok && in(ring.record(slot), sizeof(scout::RecordHeader)) &&
         in(ring.reply(slot), sizeof(scout::ReplyHeader)) &&
         in(ring.n_pages(slot), 4 * h.max_batch);
    for (uint32_t r : {0u, h.max_batch - 1})
      ok = ok && in(ring.q(slot, r), row) && in(ring.pages(slot, r), 4ull * h.max_pages) &&
           in(ring.out(slot, r), row) && in(ring.lse(slot, r), 4ull * h.q_heads);
  }
  const uint64_t plane = static_cast<uint64_t>(h.num_pages) * h.page_size * h.kv_heads *
                         h.head_dim * (h.dtype == 0 ? 4 : 2);
  for (uint32_t layer : {0u, h.num_layers - 1})
    ok = ok && in(ring.kv(layer).k, plane) && in(ring.kv(layer).v, plane);
  if (!ring.has_copies()) return ok;
  const uint64_t copy = scout::int8_record_bytes(ring.kv(0));
  for (int64_t page : {int64_t{0}, h.num_pages - 1}) {
    ok = ok && in(ring.page_word(page), 8);
    for (uint32_t layer : {0u, h.num_layers - 1})
      ok = ok && in(ring.copy_word(layer, page), 8) && in(ring.copy(layer, page), copy);
  }
  return ok;
}

void fuzz_headers(const Arena& arena, Rng& rng) {
  uint64_t accepted = 0;
  constexpr int kRounds = 100000;
  alignas(128) static char copy[scout::kHeaderBytes];
  for (int i = 0; i < kRounds; ++i) {
    std::memcpy(copy, arena.base, sizeof copy);
    // Often only the fields behind magic, version and size, so that others get their turn.
    const uint64_t words = sizeof(scout::Header) / 4;
    for (uint64_t n = 1 + rng() % 3; n > 0; --n) {
      const uint64_t word = rng() % 16 == 0 ? rng() % words : 6 + rng() % (words - 6);
      const bool wide = rng() % 2 == 0 && word % 2 == 0;
      uint64_t old = 0;
      std::memcpy(&old, copy + 4 * word, wide ? 8 : 4);
      const uint64_t fresh =
          rng() % 3 == 0 ? old + (rng() % 9 - 4) * (1ull << rng() % 13) : odd_number(rng);
      std::memcpy(copy + 4 * word, &fresh, wide ? 8 : 4);
    }
    scout::Ring ring;
    if (!ring.open(copy, arena.bytes).empty()) continue;
    ++accepted;
    if (!lies_within(ring, copy, arena.bytes))
      die("fuzz: a header that leads outside was accepted");
  }
  if (accepted == 0) die("fuzz: no damaged header was harmless, so nothing was tried");
  std::printf("fuzz: %d damaged headers, %llu harmless ones accepted\n", kRounds,
              static_cast<unsigned long long>(accepted));
}

// ---- records ------------------------------------------------------------------------------------

// A record as it is written into the ring, past all checks of the producer.
struct Raw {
  uint64_t post, log_tag, log_slot, claim, seq;
  uint32_t slot, layer, rows, parts;
  std::vector<float> q;
  std::vector<int32_t> pages, n_pages;  // of kMaxBatch rows
};

enum class Fate { kUntouched, kBadSlot, kStale, kRefused, kServed, kAbandoned };

// What the runtime has to do with it; `items` are the items that it computes.
Fate foresee(const Raw& r, uint32_t epoch, uint32_t nodes, uint64_t* items) {
  *items = 0;
  const uint64_t post = r.post & scout::kPostMask;
  if (r.log_tag != post) return Fate::kUntouched;
  if (r.log_slot >= kSlots) return Fate::kBadSlot;
  if (r.log_slot != r.slot) return Fate::kUntouched;  // that slot's claim is of another post
  if (r.claim >> 24 != post || (r.claim & scout::kItemMask) == scout::kClosed)
    return Fate::kUntouched;
  if (scout::epoch_of(r.seq) != epoch) return Fate::kStale;
  if (r.seq != scout::make_seq(epoch, r.post) || r.layer != r.slot % kLayers || r.rows < 1 ||
      r.rows > kMaxBatch || r.parts < 1 || r.parts > kMaxSplit)
    return Fate::kRefused;
  const uint64_t all = uint64_t{r.rows} * r.parts;
  const uint64_t first = r.claim & scout::kItemMask;
  if (first >= all) return Fate::kUntouched;
  *items = (all - first) * nodes;
  if (first > 0) return Fate::kAbandoned;
  for (uint32_t b = 0; b < r.rows; ++b) {
    if (r.n_pages[b] < 0 || r.n_pages[b] > static_cast<int32_t>(kMaxPages)) return Fate::kRefused;
    for (int32_t i = 0; i < r.n_pages[b]; ++i)
      if (r.pages[b * kMaxPages + i] >= static_cast<int32_t>(kNumPages)) return Fate::kRefused;
  }
  return Fate::kServed;
}

class RecordFuzz {
 public:
  RecordFuzz(const Arena& arena, const std::vector<Request>& requests, Rng& rng)
      : arena_(arena),
        ring_(arena.ring),
        nodes_(arena.ring.header().num_nodes),
        requests_(requests),
        rng_(rng),
        keeper_(arena.base, arena.bytes) {
    out_.resize(kMaxBatch * kRowFloats);
    lse_.resize(kMaxBatch * kQHeads);
    // A damaged head may name post 0, which is what a fresh ring says everywhere.
    for (uint32_t slot = 0; slot < kSlots; ++slot) set_claims(slot, scout::kClosed);
    set_all_final(keeper_, true);
  }

  void run(double until_s) {
    while (now_s() < until_s || !has_seen_all()) {
      begin_life();
      for (int i = 0; i < 200; ++i) {
        if (rng_() % 8 == 0) shake_words();
        try_bad_record();
        check_good_record();
      }
      runtime_->stop();
    }
    std::printf(
        "fuzz: records %llu left alone, %llu of no slot, %llu stale, %llu refused, %llu served, "
        "%llu torn; each with a good one after it\n",
        seen_[0], seen_[1], seen_[2], seen_[3], seen_[4], seen_[5]);
  }

 private:
  bool has_seen_all() const {
    for (unsigned long long count : seen_)
      if (count == 0) return false;
    return true;
  }

  void set_claims(uint32_t slot, uint64_t claim) {
    for (uint32_t node = 0; node < nodes_; ++node)
      scout::store_release(&ring_.record(slot)->claim[node], claim);
  }

  void begin_life() {
    scout::RuntimeOptions o;
    o.epoch = epoch_ = keeper_.next_epoch();
    o.cpus = pick_cpus(2);
    o.nodes = pick_nodes(2, nodes_);
    o.spin_us = rng_() % 2 * 100;
    first_post_ = scout::load_acquire(&ring_.control()->head);
    o.max_parts = kMaxSplit;
    runtime_ = std::make_unique<scout::Runtime>(arena_.base, arena_.bytes, o);
  }

  Raw make_raw() {
    const Request& r = requests_[rng_() % requests_.size()];
    Raw raw;
    raw.post = scout::load_acquire(&ring_.control()->head) + 1;
    raw.slot = rng_() % kSlots;
    raw.log_tag = raw.post & scout::kPostMask;
    raw.log_slot = raw.slot;
    raw.claim = raw.log_tag << 24;
    raw.seq = scout::make_seq(epoch_, raw.post);
    raw.layer = raw.slot % kLayers;
    raw.rows = r.rows;
    raw.parts = r.parts;
    raw.q = r.q;
    raw.pages = r.pages;
    raw.n_pages = r.n_pages;
    raw.q.resize(kMaxBatch * kRowFloats, 1.0f);
    raw.pages.resize(kMaxBatch * kMaxPages, 0);
    raw.n_pages.resize(kMaxBatch, 1);
    return raw;
  }

  void damage(Raw& r) {
    static constexpr int32_t kInts[] = {-1, INT_MIN, INT_MAX, kNumPages, kNumPages - 1, 8, 9, 0};
    const float inf = std::numeric_limits<float>::infinity();
    const float floats[] = {NAN, inf, -inf, 3e38f, -3e38f, 1e-45f, -0.0f};
    switch (rng_() % 12) {
      case 0:
        r.log_tag = (rng_() % 2 ? r.log_tag + 16 : odd_number(rng_)) & scout::kPostMask;
        break;
      case 1:
        r.log_slot = (rng_() % 2 ? kSlots + rng_() % 3 : odd_number(rng_)) & scout::kItemMask;
        break;
      case 2:
        r.claim = rng_() % 4 ? r.claim | rng_() % (uint64_t{r.rows} + 3) : odd_number(rng_);
        break;
      case 3:
        r.claim |= scout::kClosed;
        break;
      case 4:
        r.seq = rng_() % 2 ? scout::make_seq(epoch_ + rng_() % 3 - 1, r.post) : odd_number(rng_);
        break;
      case 5:
        r.seq = scout::make_seq(epoch_, r.post + rng_() % 3 - 1);
        break;
      case 6:
        r.layer = static_cast<uint32_t>(rng_() % 2 ? rng_() % kLayers : odd_number(rng_));
        break;
      case 7:
        r.rows = static_cast<uint32_t>(rng_() % 2 ? kMaxBatch + rng_() % 3 - 1 : odd_number(rng_));
        break;
      case 8:
        r.parts = static_cast<uint32_t>(rng_() % 2 ? kMaxSplit + rng_() % 2 : odd_number(rng_));
        break;
      case 9:
        r.n_pages[rng_() % kMaxBatch] = kInts[rng_() % 8];
        break;
      case 10:
        r.pages[rng_() % r.pages.size()] = kInts[rng_() % 8];
        break;
      default:
        for (int i = 0; i < 9; ++i) r.q[rng_() % r.q.size()] = floats[rng_() % 7];
    }
  }

  void write(const Raw& r) {
    scout::RecordHeader* record = ring_.record(r.slot);
    set_claims(r.slot, (r.post & scout::kPostMask) << 24 | scout::kClosed);
    scout::store_release(&record->seq, r.seq);
    scout::store_relaxed(&record->layer, r.layer);
    scout::store_relaxed(&record->rows, r.rows);
    scout::store_relaxed(&record->parts, r.parts);
    std::memcpy(ring_.q(r.slot, 0), r.q.data(), r.q.size() * 4);
    std::memcpy(ring_.pages(r.slot, 0), r.pages.data(), r.pages.size() * 4);
    std::memcpy(ring_.n_pages(r.slot), r.n_pages.data(), r.n_pages.size() * 4);
    set_claims(r.slot, r.claim);
    scout::store_release(ring_.log_entry(r.post), r.log_tag << 24 | r.log_slot);
    scout::store_release(&ring_.control()->head, r.post);
    ring_bell();
  }

  void ring_bell() {
    scout::Control* control = ring_.control();
    __atomic_fetch_add(&control->bell, 1u, __ATOMIC_SEQ_CST);
    scout::full_fence();
    scout::futex_wake(&control->bell, INT_MAX);
  }

  // Returns when the runtime has done with it what it has to do.
  void try_bad_record() {
    Raw r = make_raw();
    for (uint64_t n = 1 + rng_() % 2; n > 0; --n) damage(r);
    uint64_t items = 0;
    const Fate fate = foresee(r, epoch_, nodes_, &items);
    ++seen_[static_cast<int>(fate)];
    const scout::StatLine before = keeper_.totals();
    const uint64_t done_before = scout::load_acquire(&ring_.reply(r.slot)->done);
    write(r);
    const bool refused = fate == Fate::kBadSlot || fate == Fate::kRefused;
    const bool answered = fate == Fate::kRefused || fate == Fate::kServed;
    const uint64_t done = answered ? scout::make_seq(epoch_, r.post) : done_before;
    const double begin_s = now_s();
    for (;;) {
      const scout::StatLine now = keeper_.totals();
      if (now.refused == before.refused + refused &&
          now.stale == before.stale + (fate == Fate::kStale) && now.items >= before.items + items &&
          scout::load_acquire(&ring_.reply(r.slot)->done) == done)
        break;
      const bool too_often = now.refused > before.refused + refused ||
                             now.stale > before.stale + (fate == Fate::kStale);
      if (too_often || now_s() - begin_s > 60) {
        std::fprintf(
            stderr,
            "fate %d: refused +%llu stale +%llu items +%llu of %llu, post %llu log %llx/%llx "
            "claim %llx seq %llx layer %u rows %u parts %u slot %u epoch %u\n",
            static_cast<int>(fate), u(now.refused - before.refused), u(now.stale - before.stale),
            u(now.items - before.items), u(items), u(r.post), u(r.log_tag), u(r.log_slot),
            u(r.claim), u(r.seq), r.layer, r.rows, r.parts, r.slot, epoch_);
        die("fuzz: a record was not dealt with as it should");
      }
      usleep(20);
    }
    if (answered && scout::load_relaxed(&ring_.reply(r.slot)->status) !=
                        (refused ? scout::kReplyRefused : scout::kReplyOk))
      die("fuzz: wrong status");
    // What the runtime left alone is taken out of the ring, as the next record would be.
    set_claims(r.slot, scout::kClosed);
    scout::store_release(&ring_.record(r.slot)->seq, uint64_t{0});
    scout::store_release(ring_.log_entry(r.post), uint64_t{0});
  }

  // Control words that the runtime reads get nonsense for a while.
  void shake_words() {
    scout::Control* control = ring_.control();
    const uint64_t head = scout::load_acquire(&control->head);
    for (int i = 0; i < 3; ++i) {
      // Not just a little too high: a thread would take posts for seen that come only later. Nobody
      // can tell then; the producer's deadline takes them. Not before this life: what is left there
      // would be counted as stale, at a time that cannot be foreseen. The vandal does both.
      const uint64_t wrong = rng_() % 2 ? odd_number(rng_) : head - rng_() % 40;
      if (wrong > head + 10000 || (wrong >= first_post_ && wrong <= head))
        scout::store_release(&control->head, wrong);
      if (rng_() % 2) scout::store_relaxed(&control->bell, static_cast<uint32_t>(odd_number(rng_)));
      if (rng_() % 2)
        scout::store_relaxed(&control->sleepers, static_cast<uint32_t>(odd_number(rng_)));
      if (rng_() % 2) scout::store_relaxed(&control->trace, static_cast<uint32_t>(rng_()));
      scout::store_relaxed(&ring_.stats(rng_() % kLines)->events, odd_number(rng_));
      ring_bell();
      usleep(rng_() % 60);
    }
    scout::store_release(&control->head, head);
    ring_bell();
  }

  void check_good_record() {
    scout::Producer producer(arena_.base, arena_.bytes);  // knows nothing of what was written
    producer.set_life(epoch_);
    const Request& r = requests_[rng_() % requests_.size()];
    const uint32_t layer = rng_() % kLayers;
    const uint64_t step = rng_() % 2;
    const uint64_t ticket = producer.post(layer, step, r.rows, r.q.data(), r.pages.data(),
                                          kMaxPages, r.n_pages.data(), r.parts);
    const auto reply =
        producer.wait(ticket, layer, step, kPatienceUs, 50, out_.data(), lse_.data());
    if (reply.fallback_pages != 0) die("fuzz: a good record was not served");
    if (!is_right(r, layer, out_.data(), lse_.data())) die("fuzz: a good record's answer is wrong");
  }

  const Arena& arena_;
  const scout::Ring& ring_;
  const uint32_t nodes_;
  const std::vector<Request>& requests_;
  Rng& rng_;
  scout::Producer keeper_;  // for epochs and totals
  std::unique_ptr<scout::Runtime> runtime_;
  uint32_t epoch_ = 0;
  uint64_t first_post_ = 0;  // the last before this life
  std::vector<float> out_, lse_;
  unsigned long long seen_[6] = {};
};

// ---- words that change at any time --------------------------------------------------------------

// Writes nonsense anywhere in what both sides share, except into the header and the KV pages.
class Vandal {
 public:
  Vandal(const Arena& arena, uint64_t seed) : arena_(arena), rng_(seed) {
    const scout::Ring& ring = arena.ring;
    add(ring.control(), sizeof(scout::Control));
    add(ring.stats(0), sizeof(scout::StatLine) * kLines);
    add(ring.event(0, 0), sizeof(scout::Event) * ring.header().event_entries * kLines);
    add(ring.log_entry(0), 8 * ring.header().log_entries);
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      for (int i = 0; i < 4; ++i) {  // more often than the rest
        add(ring.record(slot), sizeof(scout::RecordHeader));
        add(ring.reply(slot), sizeof(scout::ReplyHeader));
      }
      add(ring.q(slot, 0), 4 * kMaxBatch * kRowFloats);
      add(ring.pages(slot, 0), 4 * kMaxBatch * kMaxPages);
      add(ring.n_pages(slot), 4 * kMaxBatch);
      add(ring.out(slot, 0), 4 * kMaxBatch * kRowFloats);
    }
    for (int i = 0; ring.has_copies() && i < 8; ++i) {
      add(ring.page_word(0), 8 * kNumPages);
      add(ring.copy_word(0, 0), 8 * kLayers * kNumPages);
    }
  }

  void run(const std::atomic<bool>& over) {
    while (!over.load(std::memory_order_relaxed)) {
      const Area& area = areas_[rng_() % areas_.size()];
      // The words lie at the start of their lines.
      const uint64_t at = rng_() % 4 == 0 ? rng_() % (area.bytes / 8) * 8
                                          : rng_() % (area.bytes / 64) * 64 + rng_() % 4 * 8;
      uint64_t* word = reinterpret_cast<uint64_t*>(area.base + at % area.bytes);
      uint64_t value = odd_number(rng_);
      if (rng_() % 3 == 0) value = scout::load_relaxed(word) + rng_() % 5 - 2;
      scout::store_relaxed(word, value);
      if (rng_() % 8 == 0) usleep(rng_() % 20);
    }
  }

 private:
  struct Area {
    char* base;
    uint64_t bytes;
  };
  void add(void* base, uint64_t bytes) { areas_.push_back({static_cast<char*>(base), bytes}); }

  const Arena& arena_;
  Rng rng_;
  std::vector<Area> areas_;
};

// Posts and waits for every slot once; returns how many of the answers were the worker's.
int check_all_slots(scout::Producer& producer, const std::vector<Request>& requests, Rng& rng,
                    int64_t patience_us) {
  std::vector<float> out(kMaxBatch * kRowFloats), lse(kMaxBatch * kQHeads);
  int by_worker = 0;
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    const Request& r = requests[rng() % requests.size()];
    const uint32_t layer = slot % kLayers;
    const uint64_t step = slot / kLayers;
    const uint64_t ticket = producer.post(layer, step, r.rows, r.q.data(), r.pages.data(),
                                          kMaxPages, r.n_pages.data(), r.parts);
    by_worker += producer.wait(ticket, layer, step, patience_us, 50, out.data(), lse.data())
                     .fallback_pages == 0;
    if (!is_right(r, layer, out.data(), lse.data())) die("fuzz: wrong answer after the damage");
  }
  return by_worker;
}

// A word that says falsely that a copy is ready is believed: all are forgotten.
void repair_copies(const Arena& arena, scout::Producer& producer) {
  const scout::Ring& ring = arena.ring;
  for (uint32_t i = 0; ring.has_copies() && i < kLayers * kNumPages; ++i)
    scout::store_release(ring.copy_word(0, i), uint64_t{0});
  set_all_final(producer, false);
  set_all_final(producer, true);
}

void fuzz_words(const Arena& arena, const std::vector<Request>& requests, Rng& rng,
                double until_s) {
  uint32_t epoch = 0;
  uint64_t rounds = 0, answers = 0, late = 0, by_worker = 0;
  do {
    // Repaired are the two numbers that a new life starts from: a damaged epoch would be used up or
    // an old one's; the head only must not be about to overflow, and both sides take it from here.
    scout::store_relaxed(&arena.ring.control()->epoch, epoch);
    uint64_t* head = &arena.ring.control()->head;
    scout::store_relaxed(head, scout::load_relaxed(head) & (~uint64_t{0} >> 8));
    // Nor may a record look as if it were of the life to come: its slot would be busy for ever.
    for (uint32_t slot = 0; slot < kSlots; ++slot)
      scout::store_relaxed(&arena.ring.record(slot)->seq, uint64_t{0});
    scout::Producer producer(arena.base, arena.bytes);
    scout::RuntimeOptions o;
    o.epoch = epoch = producer.next_epoch();
    o.cpus = pick_cpus(2);
    o.nodes = pick_nodes(2, arena.ring.header().num_nodes);
    o.spin_us = rng() % 2 * 100;
    o.max_parts = kMaxSplit;
    scout::Runtime runtime(arena.base, arena.bytes, o);
    producer.set_life(epoch);
    // A new life serves every slot again, whatever was left there.
    if (check_all_slots(producer, requests, rng, kPatienceUs) != static_cast<int>(kSlots))
      die("fuzz: a new life does not serve all slots");
    std::atomic<bool> over{false};
    Vandal vandal(arena, rng());
    std::thread thread([&] { vandal.run(over); });
    std::vector<float> out(kMaxBatch * kRowFloats), lse(kMaxBatch * kQHeads);
    for (int i = 0; i < 100; ++i) {
      // Answers may be wrong now: the request itself is damaged.
      const Request& r = requests[rng() % requests.size()];
      const uint32_t layer = i % kLayers;
      const uint64_t step = i / kLayers;
      const uint64_t ticket = producer.post(layer, step, r.rows, r.q.data(), r.pages.data(),
                                            kMaxPages, r.n_pages.data(), r.parts);
      try {
        const auto reply = producer.wait(ticket, layer, step, 1000, 20, out.data(), lse.data());
        ++(reply.fallback_pages == 0 ? answers : late);
      } catch (const std::runtime_error&) {
        ++late;  // the fallback found its request changed
      }
      runtime.progress();
    }
    over = true;
    thread.join();
    repair_copies(arena, producer);
    // The same life: a slot may be lost to it, an answer may come late, but none may be wrong.
    by_worker += check_all_slots(producer, requests, rng, 200'000);
    producer.set_life(0);
    runtime.stop();
    ++rounds;
    // On a busy machine the time may be over before each has happened.
  } while (now_s() < until_s || answers == 0 || late == 0 || by_worker == 0);
  std::printf(
      "fuzz: %llu lives with a vandal, %llu answers while it was at work, %llu taken over, "
      "afterwards %llu of %llu by the same life\n",
      static_cast<unsigned long long>(rounds), static_cast<unsigned long long>(answers),
      static_cast<unsigned long long>(late), static_cast<unsigned long long>(by_worker),
      static_cast<unsigned long long>(rounds * kSlots));
}

}  // namespace

int run_fuzz(const Options& options) {
#ifdef __SANITIZE_THREAD__
  std::puts("fuzz: skipped, it races on purpose");
  return 0;
#endif
  Rng rng(options.seed);
  for (uint32_t nodes : {1u, 2u}) {
    const double begin_s = now_s();
    const Arena arena(nodes, nodes == 2);
    const std::vector<Request> requests = random_requests(arena, options.seed, 24);
    if (nodes == 2) std::puts("fuzz: with two nodes and int8 copies");
    fuzz_headers(arena, rng);
    RecordFuzz(arena, requests, rng).run(begin_s + options.seconds * 0.3);
    fuzz_words(arena, requests, rng, begin_s + options.seconds * 0.5);
  }
  return 0;
}

}  // namespace ring_test
