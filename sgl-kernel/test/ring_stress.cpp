// Producer and runtime in one process, so that the thread sanitizer sees both sides.
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "producer.h"
#include "ring_arena.h"
#include "runtime.h"
#include "thread_reports.h"

namespace ring_test {
namespace {

const Arena* handler_arena = nullptr;
std::string damage;
std::atomic<uint64_t> thread_seeds{1};

uint64_t next_random() {
  thread_local uint64_t state = thread_seeds.fetch_add(0x9e3779b97f4a7c15ull) | 1;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// Occasionally delays a thread at a point of the protocol, so that others overtake it there.
void dawdle(scout::Point point, uint32_t slot) {
  const uint64_t roll = next_random() >> 20;
  if (point == scout::Point::kItemClaimed && roll % 64 == 1) {
    const scout::Ring& ring = handler_arena->ring;
    if (damage == "early-done")
      scout::store_release(&ring.reply(slot)->done, scout::load_acquire(&ring.record(slot)->seq));
    if (damage == "twice")
      __atomic_fetch_sub(&ring.reply(slot)->claim[0], uint64_t{1}, __ATOMIC_ACQ_REL);
  }
  if (roll % 512 == 0)
    usleep(roll / 512 % 200);
  else if (roll % 16 == 0)
    sched_yield();
}

struct InFlight {
  uint64_t ticket = 0;
  uint64_t step = 0;
  uint32_t layer = 0;
  const Request* request = nullptr;
};

// Posts two layers ahead and waits, as a decode step does, until `is_over`.
class Poster {
 public:
  Poster(scout::Producer& producer, const std::vector<Request>& requests, uint64_t seed)
      : nodes_(producer.ring().header().num_nodes),
        producer_(producer),
        requests_(requests),
        rng_(seed) {
    out_.resize(kMaxBatch * kRowFloats);
    lse_.resize(kMaxBatch * kQHeads);
  }

  // `lively`: with timeouts too short to be met and tickets that are abandoned.
  template <class IsOver>
  void run(bool lively, IsOver is_over) {
    InFlight before = post();
    while (!is_over()) {
      const InFlight next = post();
      if (!lively || rng_() % 64 != 0) wait(before, lively);
      before = next;
    }
    wait(before, false);
  }

  uint64_t by_worker = 0;
  uint64_t by_fallback = 0;
  uint64_t items = 0;  // posted, or computed here

 private:
  InFlight post() {
    if (++layer_ == kLayers) {
      layer_ = 0;
      ++step_;
    }
    const Request& r = requests_[rng_() % requests_.size()];
    InFlight f{0, step_, layer_, &r};
    f.ticket = producer_.post(layer_, step_, r.rows, r.q.data(), r.pages.data(), kMaxPages,
                              r.n_pages.data(), r.splits);
    items += r.items(nodes_);
    if (rng_() % 32 == 0) usleep(rng_() % 200);  // lets the worker fall asleep
    return f;
  }

  void wait(const InFlight& f, bool lively) {
    const bool hasty = lively && rng_() % 16 == 0;
    const auto reply = producer_.wait(f.ticket, f.layer, f.step, f.request->rows,
                                      hasty ? static_cast<int64_t>(rng_() % 100) : 60'000'000,
                                      rng_() % 2 * 50, out_.data(), lse_.data());
    if (!is_right(*f.request, f.layer, out_.data(), lse_.data()))
      die(reply.fallback_pages > 0 ? "stress: an answer of the fallback is wrong"
                                   : "stress: an answer of the worker is wrong");
    ++(reply.fallback_pages > 0 ? by_fallback : by_worker);
    std::fill(out_.begin(), out_.end(), NAN);
    std::fill(lse_.begin(), lse_.end(), NAN);
  }

  const uint32_t nodes_;
  scout::Producer& producer_;
  const std::vector<Request>& requests_;
  Rng rng_;
  std::vector<float> out_, lse_;
  uint64_t step_ = 0;
  uint32_t layer_ = kLayers - 1;
};

std::unique_ptr<scout::Runtime> begin_epoch(const Arena& arena, scout::Producer& producer, Rng& rng,
                                            uint32_t threads, uint32_t max_splits) {
  scout::RuntimeOptions o;
  o.epoch = producer.next_epoch();
  o.cpus = pick_cpus(threads);
  o.nodes = pick_nodes(threads, arena.ring.header().num_nodes);
  o.spin_us = rng() % 3 == 0 ? 0 : rng() % 100;
  o.max_splits = max_splits;
  auto runtime = std::make_unique<scout::Runtime>(arena.base, arena.bytes, o);
  producer.set_live_epoch(o.epoch);
  return runtime;
}

// One worker: every item is computed exactly once, every answer is the worker's.
void run_one_epoch(const Arena& arena, const std::vector<Request>& requests, const Options& options,
                   double until_s) {
  Rng rng(options.seed);
  scout::Producer producer(arena.base, arena.bytes);
  auto runtime = begin_epoch(arena, producer, rng, 3, kMaxSplit);
  Poster poster(producer, requests, options.seed + 1);
  poster.run(false, [&] { return now_s() >= until_s; });
  while (runtime->progress().pending != 0) usleep(100);
  const uint64_t items = runtime->progress().items;
  runtime->stop();
  if (poster.by_fallback != 0 || producer.local_tickets() != 0)
    die("stress: a healthy worker was not used");
  if (items != poster.items) {
    std::fprintf(stderr, "posted %llu items, computed %llu\n",
                 static_cast<unsigned long long>(poster.items),
                 static_cast<unsigned long long>(items));
    die("stress: items are not computed exactly once");
  }
  std::printf("stress: one worker, %u nodes, %llu records, %llu items, each once\n",
              arena.ring.header().num_nodes, static_cast<unsigned long long>(poster.by_worker),
              static_cast<unsigned long long>(items));
}

// Workers are replaced while the poster continues.
void run_epochs(const Arena& arena, const std::vector<Request>& requests, const Options& options,
                double until_s) {
  scout::Producer producer(arena.base, arena.bytes);
  std::atomic<bool> over{false};
  uint32_t epochs = 0;
  std::thread supervisor([&] {
    Rng rng(options.seed + 2);
    while (!over.load()) {
      // A worker with a smaller split limit refuses some records; the poster computes them.
      auto runtime = begin_epoch(arena, producer, rng, 1 + rng() % 3, 1 + rng() % kMaxSplit);
      ++epochs;
      usleep(1000 + rng() % 30000);
      scout::stat_totals(producer.ring());
      // Either the death is detected first, or nobody answers for a while.
      const bool noticed = rng() % 2 == 0;
      if (noticed) producer.set_live_epoch(0);
      runtime->stop();
      if (rng() % 4 == 0) usleep(rng() % 3000);
      producer.set_live_epoch(0);
    }
  });
  Poster poster(producer, requests, options.seed + 3);
  // On a busy machine the time may elapse before both sides have done something.
  poster.run(true,
             [&] { return now_s() >= until_s && poster.by_worker > 0 && poster.by_fallback > 0; });
  over = true;
  supervisor.join();
  std::printf("stress: %u workers, %llu answers of the worker, %llu of the fallback\n", epochs,
              static_cast<unsigned long long>(poster.by_worker),
              static_cast<unsigned long long>(poster.by_fallback));
}

}  // namespace

void run_stress(const Options& options) {
  damage = options.damage;
  thread_seeds = options.seed * 2 + 1;
  for (uint32_t nodes : {1u, 2u}) {
    const Arena arena(nodes);
    handler_arena = &arena;
    const std::vector<Request> requests = random_requests(arena, options.seed, 24);
    point_handler = dawdle;
    const double begin_s = now_s();
    run_one_epoch(arena, requests, options, begin_s + options.seconds * 0.2);
    run_epochs(arena, requests, options, begin_s + options.seconds * 0.5);
    point_handler = nullptr;
  }
}

}  // namespace ring_test
