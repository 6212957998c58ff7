// Attention of one sequence over a set of KV pages, on the CPU.
//
// The worker process and the decode server's fallback call the same function, so the same pages
// give the same result on both sides.
#pragma once

#include <cstdint>

namespace scout {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kI8 = 3 };

constexpr int kMaxCodedDim = 512;  // largest head_dim of kI8 pages: their sums are of 32 bits
constexpr int kCodedBlock = 16;    // tokens of a block of kI8 pages

// K and V pages of one layer, each [num_pages, page_size, kv_heads, head_dim], contiguous.
// head_dim is a multiple of 16.
//
// kI8 pages hold codes, K and V in one; a value is its code times the scale of its page and KV
// head. Codes lie in the order in which a vector of them meets query or weights without a shuffle,
// S padded to whole blocks of 16 tokens:
//
//   k       [num_pages, kv_heads, 2, S * head_dim], v is null; of a page and head
//     K     [S / 16, head_dim / 4, 16, 4]   a line: 4 channels of 16 tokens
//     V     [S / 4, head_dim, 4]            a line: 4 tokens of 16 channels
//   scales  [num_pages, 2, kv_heads] fp32: of K, of V
//
// Of each four (the last axis) the second and the third have changed places, so that the bytes of
// a 16-bit word are split into neighbours by two shifts.
struct KvPages {
  const void* k;
  const void* v;
  int64_t num_pages;
  int32_t page_size;
  int32_t kv_heads;
  int32_t head_dim;
  DType dtype;
  const float* scales = nullptr;
};

struct AttendParams {
  int32_t group;    // G: query heads per KV head
  float scale;      // factor of q.k, usually 1/sqrt(head_dim)
  float logit_cap;  // 0: none; else s = logit_cap * tanh(s / logit_cap)
};

// One sequence: out[hq] = sum_j softmax_j(s[hq, j]) v[j], s[hq, j] = scale * <q[hq], k[j]>,
// lse[hq] = log sum_j exp(s[hq, j]).
//
// q [H*G, D] fp32 row-major; query head hq uses KV head hq / G. pages int32[n]; entries < 0 are
// skipped. last_page: physical page id (or -1) of a page of which only the first last_len tokens
// (1..S) are valid, attended in addition to `pages`. out [H*G, D] fp32, lse [H*G] fp32, natural
// log. Empty set: out = 0, lse = -inf.
//
// 16-bit K and V are widened exactly; q, products and sums stay fp32. With kI8 q and the weights
// become 16-bit codes (attend_int8.h). Reads nothing outside the listed pages and no K or V
// beyond last_len, with kI8 beyond the block that it lies in (prefetch hints aside, which cannot
// fault). Page ids are the caller's to check (valid_pages). Thread-safe; allocates nothing; uses
// about 260 KiB of stack.
void attend_sequence(const KvPages& kv, const AttendParams& params, const float* q,
                     const int32_t* pages, int32_t n, int32_t last_page, int32_t last_len,
                     float* out, float* lse);

// A page of int8 codes followed by its scales (int8_record_bytes; at a multiple of four bytes).
struct Int8Record {
  const int8_t* at;
  bool cached;  // it has just been written, so it need not be prefetched
};

// A list of them.
class Int8Records {
 public:
  // Record i; good until the next call.
  virtual Int8Record get(int32_t i) = 0;
  // Where get(i) begins to read, or where the record is: for prefetching.
  virtual const int8_t* first(int32_t i) const = 0;

 protected:
  ~Int8Records() = default;
};

// The same over pages of int8 codes that lie anywhere. Each is asked for when it is its turn, so
// that what was made for it is still in cache. Of kv only the sizes count. Bitwise what
// attend_sequence makes of the same pages in planes.
void attend_records(const KvPages& kv, const AttendParams& params, const float* q,
                    Int8Records& records, int32_t n, float* out, float* lse);

// Tokens for which a page of codes has room.
static inline int64_t coded_tokens(int64_t page_size) {
  return (page_size + kCodedBlock - 1) / kCodedBlock * kCodedBlock;
}

// Bytes of the codes and scales of one page, K and V.
static inline int64_t int8_record_bytes(const KvPages& kv) {
  return 2ll * kv.kv_heads * (coded_tokens(kv.page_size) * kv.head_dim + 4);
}

// True if every entry of pages[0, n) is below num_pages (negative entries are padding and valid).
bool valid_pages(const KvPages& kv, const int32_t* pages, int32_t n);

// What attend_sequence runs on this machine: "avx512bf16", "avx512", "avx2" or "portable". The
// environment variable SCOUT_ISA, read once, may name a lower one.
const char* attend_isa();

}  // namespace scout
