// A small arena for the ring's tests, with requests whose answers are known.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "mapped_ring.h"
#include "producer.h"
#include "test_points.h"

namespace ring_test {

using Rng = std::mt19937_64;

constexpr uint32_t kLayers = 3;
constexpr uint32_t kMaxBatch = 16;
constexpr uint32_t kMaxPages = 8;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kQHeads = 4;
constexpr uint32_t kDim = 16;
constexpr uint32_t kTokens = 4;  // of a page
constexpr uint32_t kNumPages = 40;
constexpr uint32_t kMaxSplit = 3;
constexpr uint32_t kRowFloats = kQHeads * kDim;

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::_Exit(1);
}

class Arena {
 public:
  explicit Arena(uint32_t nodes = 1) {
    scout::Header h{};
    h.num_pages = kNumPages;
    h.num_layers = kLayers;
    h.page_size = kTokens;
    h.num_kv_heads = kHeads;
    h.num_q_heads = kQHeads;
    h.head_dim = kDim;
    h.max_batch = kMaxBatch;
    h.max_pages = kMaxPages;
    h.scale = 0.25f;
    h.q_dtype = nodes > 1;
    h.num_nodes = nodes;
    h.lists = 1;
    h.stripe_pages = (kNumPages + nodes - 1) / nodes;
    scout::lay_out(h);
    bytes = h.total_bytes;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) die("no memory for an arena");
    base = static_cast<char*>(memory);
    std::memcpy(base, &h, sizeof h);
    const std::string why = ring.open(base, bytes);
    if (!why.empty()) die(why.c_str());
    Rng rng(11);
    std::normal_distribution<float> normal;
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      for (uint32_t i = 0; i < kNumPages * kTokens * kHeads * kDim; ++i) {
        k(layer)[i] = normal(rng);
        v(layer)[i] = normal(rng);
      }
  }
  ~Arena() { munmap(base, bytes); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  float* k(uint32_t layer) const {
    return static_cast<float*>(const_cast<void*>(ring.kv(layer).k));
  }
  float* v(uint32_t layer) const {
    return static_cast<float*>(const_cast<void*>(ring.kv(layer).v));
  }

  char* base = nullptr;
  uint64_t bytes = 0;
  scout::Ring ring;
};

struct Answer {
  std::vector<float> out, lse;
};

struct Request {
  uint32_t rows = 0;
  uint32_t splits = 1;
  std::vector<float> q;
  std::vector<int32_t> pages;  // [rows, kMaxPages]
  std::vector<int32_t> n_pages;
  std::vector<Answer> answers;  // by layer

  uint64_t items(uint32_t nodes) const { return uint64_t{rows} * splits * nodes; }
};

inline Answer answer_of(const Arena& arena, uint32_t layer, const Request& r) {
  Answer a{std::vector<float>(uint64_t{r.rows} * kRowFloats),
           std::vector<float>(uint64_t{r.rows} * kQHeads)};
  for (uint32_t b = 0; b < r.rows; ++b)
    scout::attend_sequence(arena.ring.kv(layer), arena.ring.params(), &r.q[b * kRowFloats],
                           &r.pages[b * kMaxPages], r.n_pages[b], -1, 0, &a.out[b * kRowFloats],
                           &a.lse[b * kQHeads]);
  return a;
}

// Has at least one page, so that the record is really posted.
inline Request random_request(const Arena& arena, Rng& rng, uint32_t max_splits) {
  Request r;
  r.rows = 1 + rng() % 6;
  r.splits = 1 + rng() % max_splits;
  std::normal_distribution<float> normal;
  r.q.resize(uint64_t{r.rows} * kRowFloats);
  for (float& x : r.q) {  // exactly representable in a record
    x = normal(rng);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= 0xffff0000u;
    std::memcpy(&x, &bits, sizeof bits);
  }
  r.pages.resize(r.rows * kMaxPages);
  for (int32_t& id : r.pages) id = static_cast<int32_t>(rng() % (kNumPages + 1)) - 1;
  r.n_pages.resize(r.rows);
  for (int32_t& n : r.n_pages) n = static_cast<int32_t>(rng() % (kMaxPages + 1));
  r.pages[0] = static_cast<int32_t>(rng() % kNumPages);
  r.n_pages[0] = kMaxPages;
  for (uint32_t layer = 0; layer < kLayers; ++layer)
    r.answers.push_back(answer_of(arena, layer, r));
  return r;
}

inline std::vector<Request> random_requests(const Arena& arena, uint64_t seed, int count,
                                            uint32_t max_splits = kMaxSplit) {
  Rng rng(seed);
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) requests.push_back(random_request(arena, rng, max_splits));
  return requests;
}

inline bool is_right(const Request& r, uint32_t layer, const float* out, const float* lse) {
  // Different requests differ by far more than this, different summation orders by far less.
  // Arenas of several nodes have results in bf16.
  constexpr float kTolerance = 1e-4f, kRounding = 1.0f / 256;
  const Answer& a = r.answers[layer];
  for (size_t i = 0; i < a.out.size(); ++i)
    if (!(std::fabs(out[i] - a.out[i]) <= kTolerance + kRounding * std::fabs(a.out[i])))
      return false;
  for (size_t i = 0; i < a.lse.size(); ++i)
    if (lse[i] != a.lse[i] && !(std::fabs(lse[i] - a.lse[i]) <= kTolerance)) return false;
  return true;
}

struct Options {
  double seconds = 4;
  uint64_t seed = 1;
  std::string damage;  // a bug to inject, see ring_test.cpp
};

// What a thread does at a test point; set before threads start.
using PointHandler = void (*)(scout::Point, uint32_t slot);
extern PointHandler point_handler;

inline double now_s() { return static_cast<double>(scout::now_ns()) * 1e-9; }

// `count` CPUs of this process, with repetitions if there are fewer.
std::vector<int> pick_cpus(uint32_t count);
// Nodes of `count` threads, round-robin: with more nodes than threads some have none.
std::vector<int> pick_nodes(uint32_t count, uint32_t nodes);

void run_stress(const Options& options);
void run_kill(const Options& options);

}  // namespace ring_test
