// Producer and worker in separate processes; either is killed at every named point of the protocol
// and at random times, and is replaced. In all cases every answer must be right and the other side
// must continue.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "producer.h"
#include "ring_arena.h"
#include "runtime.h"

namespace ring_test {
namespace {

enum class Role : uint32_t { kNobody, kProducer, kWorker };

// State shared by the three processes, with the writer of each word. The parent is the supervisor.
struct Board {
  uint32_t live;       // parent: the epoch that gets work, 0: none
  uint32_t live_seen;  // producer: the last value it has read
  uint32_t ready;      // worker: its epoch
  uint32_t stop;       // parent: 1 stops the producer, 2 the worker too
  uint32_t victim;     // parent: Role
  uint32_t point;      // parent: where it dies
  int32_t countdown;   // passes of that point before
  uint64_t by_worker;  // producer: correct answers
  uint64_t by_fallback;
};

Board* board = nullptr;
Role own_role = Role::kNobody;

void die_here(scout::Point point, uint32_t) {
  if (scout::load_acquire(&board->victim) != static_cast<uint32_t>(own_role) ||
      scout::load_relaxed(&board->point) != static_cast<uint32_t>(point))
    return;
  if (__atomic_sub_fetch(&board->countdown, 1, __ATOMIC_ACQ_REL) < 0) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
}

[[noreturn]] void be_worker(const Arena& arena, uint32_t epoch, Rng& rng) {
  scout::RuntimeOptions o;
  o.epoch = epoch;
  o.cpus = pick_cpus(2);
  o.nodes = pick_nodes(2, arena.ring.header().num_nodes);
  o.spin_us = rng() % 2 * 50;
  o.max_splits = kMaxSplit;
  scout::Runtime runtime(arena.base, arena.bytes, o);
  scout::store_release(&board->ready, epoch);
  while (scout::load_acquire(&board->stop) < 2) usleep(500);
  runtime.stop();
  _exit(0);
}

[[noreturn]] void be_producer(const Arena& arena, const std::vector<Request>& requests, Rng& rng) {
  scout::Producer producer(arena.base, arena.bytes);
  std::thread watcher([&] {
    uint32_t told = 0;
    while (scout::load_acquire(&board->stop) == 0) {
      const uint32_t live = scout::load_acquire(&board->live);
      if (live != told) producer.set_live_epoch(told = live);
      scout::store_release(&board->live_seen, told);
      usleep(100);
    }
  });
  struct InFlight {
    uint64_t ticket;
    const Request* request;
  } before{0, nullptr};
  std::vector<float> out(kMaxBatch * kRowFloats), lse(kMaxBatch * kQHeads);
  for (uint64_t n = rng() % 2 * kLayers; scout::load_acquire(&board->stop) == 0; ++n) {
    const uint32_t layer = n % kLayers;
    const Request& r = requests[rng() % requests.size()];
    const InFlight next{producer.post(layer, n / kLayers, r.rows, r.q.data(), r.pages.data(),
                                      kMaxPages, r.n_pages.data(), r.splits),
                        &r};
    if (before.request != nullptr) {
      const uint32_t at = (n - 1) % kLayers;
      const auto reply = producer.wait(before.ticket, at, (n - 1) / kLayers, before.request->rows,
                                       600'000'000, rng() % 2 * 50, out.data(), lse.data());
      if (!is_right(*before.request, at, out.data(), lse.data()))
        die(reply.fallback_pages > 0 ? "kill: an answer of the fallback is wrong"
                                     : "kill: an answer of the worker is wrong");
      uint64_t* count = reply.fallback_pages > 0 ? &board->by_fallback : &board->by_worker;
      __atomic_fetch_add(count, uint64_t{1}, __ATOMIC_ACQ_REL);
    }
    before = next;
    if (rng() % 4 == 0) usleep(rng() % 200);  // lets the worker fall asleep
  }
  watcher.join();
  _exit(0);
}

class Parent {
 public:
  Parent(const Arena& arena, const std::vector<Request>& requests, uint64_t seed)
      : arena_(arena), requests_(requests), rng_(seed), keeper_(arena.base, arena.bytes) {}

  void run(double until_s) {
    start_worker();
    start_producer();
    expect_service();
    const uint32_t points = static_cast<uint32_t>(scout::Point::kCount);
    for (int pass = 0; pass < 2; ++pass)
      for (uint32_t p = 0; p < points; ++p) die_at(static_cast<scout::Point>(p));
    uint64_t at_random = 0;
    while (now_s() < until_s) {
      if (rng_() % 3 == 0) {
        die_at(static_cast<scout::Point>(rng_() % points));
        continue;
      }
      usleep(rng_() % 3000);
      const Role victim = rng_() % 2 ? Role::kProducer : Role::kWorker;
      kill(victim == Role::kProducer ? producer_ : worker_, SIGKILL);
      ++at_random;
      replace(victim);
    }
    scout::store_release(&board->stop, 1u);
    collect(producer_, 0);
    scout::store_release(&board->stop, 2u);  // until then the producer may wait for an answer
    collect(worker_, 0);
    std::printf(
        "kill: %llu deaths at %u places, %llu at random; %llu answers of workers, %llu of "
        "the fallback, all right\n",
        static_cast<unsigned long long>(deaths_ - at_random), points,
        static_cast<unsigned long long>(at_random),
        static_cast<unsigned long long>(board->by_worker),
        static_cast<unsigned long long>(board->by_fallback));
  }

 private:
  template <class Be>
  pid_t start(Role role, Be be) {
    std::fflush(nullptr);
    const uint64_t seed = rng_();
    const pid_t pid = fork();
    if (pid < 0) die("fork");
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    own_role = role;
    point_handler = die_here;
    Rng rng(seed);
    be(rng);
    std::abort();
  }

  void start_worker() {
    epoch_ = keeper_.next_epoch();
    worker_ = start(Role::kWorker, [&](Rng& rng) { be_worker(arena_, epoch_, rng); });
    while (scout::load_acquire(&board->ready) != epoch_) check_alive(worker_);
    scout::store_release(&board->live, epoch_);
  }

  void start_producer() {
    scout::store_release(&board->live_seen, UINT32_MAX);
    producer_ = start(Role::kProducer, [&](Rng& rng) { be_producer(arena_, requests_, rng); });
  }

  void check_alive(pid_t pid) {
    usleep(200);
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) die("kill: a process ended that nobody had killed");
  }

  void collect(pid_t pid, int signal) {
    int status = 0;
    if (waitpid(pid, &status, 0) != pid) die("waitpid");
    const bool as_meant = signal == 0 ? WIFEXITED(status) && WEXITSTATUS(status) == 0
                                      : WIFSIGNALED(status) && WTERMSIG(status) == signal;
    if (!as_meant) die("kill: a process ended otherwise than it should");
  }

  void expect_more(uint64_t* count) {
    const uint64_t enough = scout::load_acquire(count) + 4;
    while (scout::load_acquire(count) < enough) check_alive(producer_);
  }
  void expect_service() { expect_more(&board->by_worker); }

  void die_at(scout::Point point) {
    const Role victim = point < scout::Point::kEntryRead ? Role::kProducer : Role::kWorker;
    scout::store_relaxed(&board->point, static_cast<uint32_t>(point));
    scout::store_relaxed(&board->countdown, static_cast<int32_t>(rng_() % 8));
    scout::store_release(&board->victim, static_cast<uint32_t>(victim));
    replace(victim);
  }

  // Waits for the victim's death and starts a replacement.
  void replace(Role victim) {
    collect(victim == Role::kProducer ? producer_ : worker_, SIGKILL);
    ++deaths_;
    scout::store_release(&board->victim, static_cast<uint32_t>(Role::kNobody));
    if (victim == Role::kWorker) {
      workers_kept_ = 0;
      if (rng_() % 2) usleep(rng_() % 2000);  // not detected yet
      scout::store_release(&board->live, 0u);
      expect_more(&board->by_fallback);
      start_worker();
    } else if (workers_kept_ < 2 && rng_() % 2) {
      ++workers_kept_;  // the worker outlives its producer; a half written record costs it a slot
      start_producer();
    } else {
      workers_kept_ = 0;
      kill(worker_, SIGKILL);
      collect(worker_, SIGKILL);
      if (rng_() % 2) {
        start_worker();
        start_producer();
      } else {
        scout::store_release(&board->live, 0u);
        start_producer();
        expect_more(&board->by_fallback);
        start_worker();
      }
    }
    expect_service();
  }

  const Arena& arena_;
  const std::vector<Request>& requests_;
  Rng rng_;
  scout::Producer keeper_;  // for epochs only
  uint32_t epoch_ = 0;
  pid_t producer_ = -1;
  pid_t worker_ = -1;
  uint64_t deaths_ = 0;
  int workers_kept_ = 0;
};

}  // namespace

void run_kill(const Options& options) {
#ifdef __SANITIZE_THREAD__
  // It sees only one process. A thread's write after another's read is ordered by the producer in
  // the other process, which took the answer in between: reported as a race.
  std::puts("kill: skipped, the order of two processes is not visible to the thread sanitizer");
  return;
#endif
  void* memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) die("no memory for the board");
  board = static_cast<Board*>(memory);
  for (uint32_t nodes : {1u, 2u}) {
    std::memset(static_cast<void*>(board), 0, sizeof(Board));
    const double begin_s = now_s();
    const Arena arena(nodes);
    const std::vector<Request> requests = random_requests(arena, options.seed, 24);
    Parent(arena, requests, options.seed).run(begin_s + options.seconds / 2);
  }
}

}  // namespace ring_test
