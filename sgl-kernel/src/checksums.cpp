#include "checksums.h"

#include <cstring>
#include <functional>

#include "thread_pool.h"

namespace scout {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // of CRC-32C, bits reversed
constexpr uint64_t kLeadBytes = 2048;
constexpr int kTaskPages = 8;  // (layer, page) pairs of a task

uint64_t word_at(const char* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// Inline asm rather than a builtin, which would need a separate file compiled for SSE4.2; AVX2
// implies that.
inline uint32_t add_word(uint32_t crc, uint64_t word) {
  uint64_t sum = crc;
  asm("crc32q %1, %0" : "+r"(sum) : "rm"(word));
  return static_cast<uint32_t>(sum);
}

// Product of polynomials modulo the CRC-32C polynomial; bit 31 is x^0.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = b >> 1 ^ (b & 1 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 bytes): multiplies a CRC for that many bytes appended. Cached, as page sizes are equal.
uint32_t shift_by(uint64_t bytes) {
  static thread_local uint64_t known = 0;
  static thread_local uint32_t shift = 0;
  if (known == bytes) return shift;
  uint32_t result = 1u << 31, power = 1u << 23;
  for (uint64_t left = bytes; left != 0; left >>= 1, power = multiply(power, power))
    if ((left & 1) != 0) result = multiply(result, power);
  known = bytes;
  return shift = result;
}

// Four independent lanes to hide the latency of crc32; prefetches as in attend_kernel.h.
uint32_t checksum(const char* k, const char* v, uint64_t bytes) {
  uint32_t lane[] = {~0u, 0, 0, 0};
  for (const char* half : {k, v}) {
    for (uint64_t at = 0; at < bytes; at += 32) {
      __builtin_prefetch(half + at + kLeadBytes);
      for (int i = 0; i < 4; ++i) lane[i] = add_word(lane[i], word_at(half + at + 8 * i));
    }
  }
  const uint32_t shift = shift_by(bytes / 2);
  uint32_t sum = lane[0];
  for (int i = 1; i < 4; ++i) sum = multiply(sum, shift) ^ lane[i];
  return ~sum;
}

uint32_t checksum_of(const Ring& ring, uint32_t layer, int64_t page) {
  const KvPages kv = ring.kv(layer);
  const uint64_t bytes = uint64_t(kv.page_size) * kv.stored_heads * head_bytes(kv);
  const uint64_t at = static_cast<uint64_t>(page) * bytes;
  return page_checksum(static_cast<const char*>(kv.k) + at, static_cast<const char*>(kv.v) + at,
                       bytes);
}

void for_pages(int64_t n, int threads, const std::function<void(int64_t)>& fn) {
  const int tasks = static_cast<int>((n + kTaskPages - 1) / kTaskPages);
  parallel_for(tasks, threads, [&](int task) {
    for (int64_t i = int64_t{task} * kTaskPages; i < n && i < int64_t{task + 1} * kTaskPages; ++i)
      fn(i);
  });
}

}  // namespace

uint32_t page_checksum(const void* k, const void* v, uint64_t bytes) {
  return checksum(static_cast<const char*>(k), static_cast<const char*>(v), bytes);
}

bool is_sound(const Ring& ring, uint32_t layer, int64_t page) {
  uint64_t* const at = ring.checksum(layer, page);
  if (at == nullptr) return true;
  uint64_t word = load_acquire(at);
  if ((word & kDamaged) != 0) return false;
  if ((word & kSealed) == 0) return true;
  if (checksum_of(ring, layer, page) == static_cast<uint32_t>(word)) return true;
  // If the page was freed meanwhile and reused, its word has changed and the exchange fails.
  if (__atomic_compare_exchange_n(at, &word, word | kDamaged, false, __ATOMIC_ACQ_REL,
                                  __ATOMIC_ACQUIRE))
    __atomic_fetch_add(&ring.bell()->damaged, 1u, __ATOMIC_RELEASE);
  return false;
}

void seal_pages(const Ring& ring, const int64_t* pages, int64_t n, int threads) {
  for_pages(n * ring.header().num_layers, threads, [&](int64_t i) {
    const auto layer = static_cast<uint32_t>(i / n);
    uint64_t* const at = ring.checksum(layer, pages[i % n]);
    if (load_relaxed(at) == 0) store_release(at, kSealed | checksum_of(ring, layer, pages[i % n]));
  });
}

void check_pages(const Ring& ring, const int64_t* layers, const int64_t* pages, int64_t n,
                 int threads) {
  for_pages(n, threads,
            [&](int64_t i) { is_sound(ring, static_cast<uint32_t>(layers[i]), pages[i]); });
}

}  // namespace scout
