// attend_batch, in which threads share sequences, on random batches, compared with one thread; run
// it under the thread sanitizer.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "attend.h"

namespace {

constexpr int kHeads = 8, kDim = 128, kTokens = 32, kGroup = 2, kPages = 6;  // 256 KiB a page
constexpr int kQHeads = kHeads * kGroup;

void require(bool good, const char* what, unsigned seed) {
  if (good) return;
  std::fprintf(stderr, "batch_test: %s, seed %u\n", what, seed);
  std::exit(1);
}

bool near(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // both -inf
    if (!(std::fabs(a[i] - b[i]) <= 1e-5f * (1.0f + std::fabs(b[i])))) return false;
  }
  return true;
}

void run(unsigned seed, const scout::KvPages& kv) {
  std::mt19937 random(seed);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  std::normal_distribution<float> normal;
  const int lists = below(2) ? kHeads : 1;
  const int batch = 1 + below(4), columns = below(20 * lists);  // a head's pages are smaller
  std::vector<float> q(batch * kQHeads * kDim);
  for (float& x : q) x = normal(random);
  std::vector<int32_t> pages(batch * lists * columns), last_page(batch), last_len(batch);
  const int holes = 1 + below(4);
  for (int32_t& id : pages) id = below(holes) == 0 ? -1 : below(kPages);
  for (int b = 0; b < batch; ++b) {
    last_page[b] = below(kPages + 1) - 1;
    last_len[b] = last_page[b] < 0 ? 0 : 1 + below(kTokens);
  }
  const bool tails = below(3) != 0;
  const auto attend = [&](int threads, std::vector<float>& out, std::vector<float>& lse) {
    scout::attend_batch(
        kv, {kGroup, 0.1f},
        {q.data(), pages.data(), batch, columns, lists, tails ? last_page.data() : nullptr,
         tails ? last_len.data() : nullptr, out.data(), lse.data()},
        threads);
  };
  std::vector<float> out(q.size(), NAN), lse(batch * kQHeads, NAN);
  std::vector<float> expected(out), expected_lse(lse);
  attend(1, expected, expected_lse);
  attend(1 + below(12), out, lse);
  require(near(out, expected), "out differs from one thread's", seed);
  require(near(lse, expected_lse), "lse differs from one thread's", seed);
}

}  // namespace

int main() {
  const size_t elements = static_cast<size_t>(kPages) * kTokens * kHeads * kDim;
  std::vector<float> k(elements), v(elements);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (float& x : k) x = normal(random);
  for (float& x : v) x = normal(random);
  const scout::KvPages kv{k.data(), v.data(),           kPages, kTokens, kHeads,
                          kDim,     scout::DType::kF32, kHeads};
  for (unsigned seed = 1; seed <= 80; ++seed) run(seed, kv);
  std::puts("batch_test: ok");
}
