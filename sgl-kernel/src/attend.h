// Attention of one sequence over a set of KV pages, on the CPU.
//
// The worker process and the decode server's fallback call the same function, so the same pages
// give the same result on both sides.
#pragma once

#include <cstdint>

namespace scout {

// The eight-bit types are those of OCP FP8, as torch's float8_e4m3fn and float8_e5m2.
enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kE4M3 = 3, kE5M2 = 4 };
constexpr int kDTypes = 5;

constexpr int bytes_of(DType type) {
  return type == DType::kF32 ? 4 : type == DType::kBF16 || type == DType::kF16 ? 2 : 1;
}

// K and V pages of one layer, each [num_pages, page_size, stored_heads, head_dim], contiguous, or a
// view of kv_heads of these heads, the first of which k and v point to. head_dim is a multiple
// of 16.
struct KvPages {
  const void* k;
  const void* v;
  int64_t num_pages;
  int32_t page_size;
  int32_t kv_heads;
  int32_t head_dim;
  DType dtype;
  int32_t stored_heads;
};

inline int64_t head_bytes(const KvPages& kv) { return int64_t{kv.head_dim} * bytes_of(kv.dtype); }

// The KV heads of list `list`, if a request has `lists` page lists: 1, or one for each head.
inline KvPages heads_of_list(KvPages kv, uint32_t list, uint32_t lists) {
  kv.kv_heads /= static_cast<int32_t>(lists);
  const int64_t before = int64_t{list} * kv.kv_heads * head_bytes(kv);
  kv.k = static_cast<const char*>(kv.k) + before;
  kv.v = static_cast<const char*>(kv.v) + before;
  return kv;
}

struct AttendParams {
  int32_t group;  // G: query heads per KV head
  float scale;    // factor of q.k, usually 1/sqrt(head_dim)
};

// One sequence: out[hq] = sum_j softmax_j(s[hq, j]) v[j], s[hq, j] = scale * <q[hq], k[j]>,
// lse[hq] = log sum_j exp(s[hq, j]).
//
// q [H*G, D] fp32 row-major; query head hq uses KV head hq / G. pages int32[n]; entries < 0 are
// skipped. last_page: physical page id (or -1) of a page of which only the first last_len tokens
// (1..S) are valid, attended in addition to `pages`. out [H*G, D] fp32, lse [H*G] fp32, natural
// log. Empty set: out = 0, lse = -inf.
//
// Narrower K and V are widened exactly; q, products and sums stay fp32. One exception: avx512bf16
// on fp8 pages with queries that are exact in bf16 rounds softmax weights to bf16 for the product
// with V: out differs by up to 2^-8 of the weighted mean of |V|, lse not at all. The NaN of e4m3,
// to which out-of-range values are rounded, counts as 480. Reads nothing outside the listed pages
// (except prefetches, which cannot fault) and uses no K or V beyond last_len. The caller checks
// page ids. Thread-safe; allocates nothing; uses about 260 KiB of stack.
void attend_sequence(const KvPages& kv, const AttendParams& params, const float* q,
                     const int32_t* pages, int32_t n, int32_t last_page, int32_t last_len,
                     float* out, float* lse);

// `batch` requests, contiguous: q and out [batch, H*G, D], lse [batch, H*G], pages [batch * lists,
// columns]; last_page and last_len [batch], or both nullptr. Each list of pages is a sequence of
// attend_sequence, over all KV heads or, where there are H lists, over one.
struct AttendBatch {
  const float* q;
  const int32_t* pages;
  int32_t batch;
  int32_t columns;
  int32_t lists;
  const int32_t* last_page;
  const int32_t* last_len;
  float* out;
  float* lse;
};

// By threads of this process, not by the worker's. Where whole sequences would leave threads idle,
// several share one (split.h); so the number of threads decides the order of sums.
void attend_batch(const KvPages& kv, const AttendParams& params, const AttendBatch& of,
                  int threads);

// The arguments of attend_sequence, and its variants by instruction set.
struct AttendArgs {
  const KvPages* kv;
  const AttendParams* params;
  const float* q;
  const int32_t* pages;
  int32_t n;
  int32_t last_page;
  int32_t last_len;
  float* out;
  float* lse;
};

// head_dim must be a multiple of 16, for attend_avx512 of 32. attend_avx512bf16 takes bf16 pages,
// of which it must be one of 32, and fp8 pages, of 64.
void attend_avx2(const AttendArgs& args);
void attend_avx512(const AttendArgs& args);
void attend_avx512bf16(const AttendArgs& args);

}  // namespace scout
