// int8 copies of pages under threads that dawdle, while pages are freed and given to others.
// However late a thread is, no answer may show another content than the one that its pages have
// when it is asked for, nor half of it.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "page_copies.h"
#include "producer.h"
#include "ring_arena.h"
#include "runtime.h"

namespace ring_test {
namespace {

#ifdef __SANITIZE_THREAD__
// A page that is filled again under a late reader is a race by intention. Here the late ones are
// waited for, so that every race that is left is none.
constexpr bool kWaitsForLateOnes = true;
#else
constexpr bool kWaitsForLateOnes = false;
#endif

const Arena* handler_arena = nullptr;
std::string damage;
std::atomic<uint64_t> thread_seeds{1};
constexpr uint32_t kNoCopy = UINT32_MAX;

void store_ready(uint32_t index) {
  const scout::Ring& ring = handler_arena->ring;
  const uint64_t generation = scout::load_acquire(ring.page_word(index % kNumPages));
  scout::store_release(ring.copy_word(0, index),
                       scout::copy_word(generation, 1, scout::CopyState::kReady));
}

// Threads are late where it matters: with a copy claimed, and before they say that it is ready.
void dawdle(scout::Point point, uint32_t index) {
  thread_local Rng rng(thread_seeds.fetch_add(1));
  thread_local uint32_t written = kNoCopy;
  const bool of_copy = point == scout::Point::kCopyClaimed || point == scout::Point::kCopyWritten;
  if (point == scout::Point::kCopyClaimed && damage == "early-copy") store_ready(index);
  if (of_copy && rng() % 8 == 0)
    usleep(rng() % 2000);
  else if (rng() % 16 == 0)
    sched_yield();
  if (damage == "old-copy") {
    // At the point after: its own word, of the generation that it was made of, is there by then.
    if (written != kNoCopy) store_ready(written);
    written = point == scout::Point::kCopyWritten ? index : kNoCopy;
  }
}

class Reuse {
 public:
  Reuse(Arena& arena, uint64_t seed)
      : arena_(arena), rng_(seed), producer_(arena.base, arena.bytes) {
    out_.resize(kMaxBatch * kRowFloats);
    lse_.resize(kMaxBatch * kQHeads);
    set_all_final(producer_, true);
  }

  void run(double until_s) {
    begin_life();
    // On a busy machine the time may be over before each has happened.
    while (now_s() < until_s || by_worker_ == 0 || by_fallback_ == 0) {
      if (rng_() % 256 == 0) begin_life();
      if (rng_() % 2 == 0) reuse_pages();
      ask();
    }
    runtime_->stop();
    std::printf(
        "copies: %llu answers of workers, %llu of the fallback, each as it should be; %llu pages "
        "given to others, %llu quantised\n",
        u(by_worker_), u(by_fallback_), u(reused_),
        u(producer_.totals().quantized + producer_.quantized_pages()));
  }

 private:
  static unsigned long long u(uint64_t x) { return x; }  // for printf

  void begin_life() {
    producer_.set_life(0);
    if (runtime_) runtime_->stop();
    scout::RuntimeOptions o;
    o.epoch = producer_.next_epoch();
    o.cpus = pick_cpus(3);
    o.spin_us = rng_() % 100;
    o.max_parts = kMaxSplit;
    runtime_ = std::make_unique<scout::Runtime>(arena_.base, arena_.bytes, o);
    producer_.set_life(o.epoch);
  }

  void reuse_pages() {
    std::vector<int64_t> pages(kNumPages);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), rng_);
    const int64_t n = 1 + rng_() % 8;
    producer_.set_final(pages.data(), n, false);
    while (kWaitsForLateOnes && runtime_->progress().pending != 0) usleep(50);
    for (int64_t i = 0; i < n; ++i) arena_.fill_page(static_cast<uint32_t>(pages[i]), rng_);
    // Some are used without being said to be final: they get no copy, but the right answer.
    producer_.set_final(pages.data(), rng_() % 4 == 0 ? n / 2 : n, true);
    reused_ += n;
  }

  // Rows share pages, so that threads meet at them. Answers that do not come soon are given up, and
  // who computes them is late.
  void ask() {
    Request r = random_request(arena_, rng_, kMaxSplit);
    const uint64_t step = step_++;
    std::vector<uint64_t> tickets(kLayers);
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      tickets[layer] = producer_.post(layer, step, r.rows, r.q.data(), r.pages.data(), kMaxPages,
                                      r.n_pages.data(), r.parts);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const int64_t patience_us = rng_() % 2 ? 60'000'000 : rng_() % 1000;
      const auto reply = producer_.wait(tickets[layer], layer, step, patience_us, rng_() % 50,
                                        out_.data(), lse_.data());
      if (!is_right(r, layer, out_.data(), lse_.data()))
        die(reply.fallback_pages > 0 ? "copies: an answer of the fallback is wrong"
                                     : "copies: an answer of the worker is wrong");
      ++(reply.fallback_pages > 0 ? by_fallback_ : by_worker_);
    }
  }

  Arena& arena_;
  Rng rng_;
  scout::Producer producer_;
  std::unique_ptr<scout::Runtime> runtime_;
  std::vector<float> out_, lse_;
  uint64_t step_ = 0;
  uint64_t by_worker_ = 0;
  uint64_t by_fallback_ = 0;
  uint64_t reused_ = 0;
};

}  // namespace

int run_copies(const Options& options) {
  Arena arena(2, true);
  handler_arena = &arena;
  damage = options.damage;
  thread_seeds = options.seed * 1000;
  point_handler = dawdle;
  Reuse(arena, options.seed).run(now_s() + options.seconds);
  return 0;
}

}  // namespace ring_test
