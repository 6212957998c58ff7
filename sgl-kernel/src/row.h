// Attention of one row of a record, split by split; shared by worker, producer and attendant.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "checksums.h"
#include "mapped_ring.h"
#include "split.h"

namespace scout {

// Decoded page ids: whole pages and a partial last one.
struct ContextPart {
  int32_t whole = 0;
  int32_t last_page = -1, last_len = 0;
};

// Decodes ids of context pages in place; other ids are unchanged. False if a list mixes both, or
// context ids are used with a list for several heads.
inline bool decode_ids(const Header& h, bool is_context, int32_t* ids, int32_t count,
                       ContextPart* part) {
  const auto size = static_cast<int32_t>(h.page_size);
  if (is_context && h.lists != h.num_kv_heads) return false;
  for (int32_t i = 0; i < count; ++i) {
    if ((ids[i] >= h.num_pages) != is_context || part->last_page >= 0) return false;
    const int32_t at = ids[i] - static_cast<int32_t>(h.num_pages);
    if (!is_context) {
      ++part->whole;
    } else if (at % size == size - 1) {
      ids[part->whole++] = at / size;
    } else {
      part->last_page = at / size;
      part->last_len = at % size + 1;
    }
  }
  return true;
}

// Attends to one split of the pages of row `row` of a record: number `split % splits` of those of
// node `split / splits`. `scratch` [max_pages] holds their ids: they are read once, checked and
// then used, so a record that changes concurrently cannot cause access outside the arena. `query`
// [q_floats] receives `q` (in the record's dtype) as fp32. A damaged page is skipped: its word
// reports it to the server, which fails the requests that own it. Returns the number of pages, or
// -1 if a count or an id is out of range (then nothing is written). If a row has several splits,
// one without pages writes only its lse.
inline int32_t attend_split(const Ring& ring, uint32_t layer, uint32_t row, const void* q,
                            const int32_t* pages, int32_t n, uint32_t split, uint32_t splits,
                            int32_t* scratch, float* query, float* out, float* lse) {
  const Header& h = ring.header();
  if (n < 0 || n > static_cast<int32_t>(h.max_pages)) return -1;
  const uint32_t node = split / splits;
  const int64_t first = int64_t{h.stripe_pages} * node;
  const int64_t end = node + 1 == h.num_nodes ? id_end(h) : first + h.stripe_pages;
  const uint32_t own = split % splits;
  int32_t listed = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t id = load_relaxed(pages + i);
    if (id >= id_end(h)) return -1;
    if (id < 0 || (id >= first && id < end)) scratch[listed++] = id;
  }
  const int32_t lo = static_cast<int32_t>(int64_t{listed} * own / splits);
  const int32_t hi = static_cast<int32_t>(int64_t{listed} * (own + 1) / splits);
  int32_t count = 0;
  for (int32_t i = lo; i < hi; ++i)
    if (scratch[i] >= 0 && is_sound(ring, layer, scratch[i])) scratch[count++] = scratch[i];
  if (count == 0 && splits * h.num_nodes > 1) {  // one of several: the merge ignores `out`
    for (uint32_t head = 0; head < h.row_heads; ++head) lse[head] = -INFINITY;
    return 0;
  }
  const KvPages kv = heads_of_list(ring.kv(layer), row % h.lists, h.lists);
  ContextPart found;
  const bool is_context = count > 0 && scratch[0] >= h.num_pages;
  if (!decode_ids(h, is_context, scratch, count, &found)) return -1;
  ring.load_values(q, ring.q_floats(), query);
  attend_sequence(is_context ? ring.context(layer) : kv, ring.params(), query, scratch, found.whole,
                  found.last_page, found.last_len, out, lse);
  return count;
}

// Attends to whole rows outside the worker, split by split like a worker, so bit-identical.
class RowAttention {
 public:
  // Writes out [row_heads, D] in q_dtype and lse [row_heads]. Returns the number of pages, or -1
  // like attend_split.
  int64_t attend(const Ring& ring, uint32_t layer, uint32_t row, const void* q,
                 const int32_t* pages, int32_t n, uint32_t splits, void* out, float* lse) {
    const Header& h = ring.header();
    const uint32_t all = splits * h.num_nodes;
    const uint64_t stride = ring.q_floats() + h.row_heads;
    ids_.resize(h.max_pages);
    query_.resize(ring.q_floats());
    results_.resize((all + 1) * stride);
    int64_t total = 0;
    for (uint32_t split = 0; split < all; ++split) {
      float* to = results_.data() + split * stride;
      float* to_lse = all == 1 ? lse : to + ring.q_floats();
      const int32_t count = attend_split(ring, layer, row, q, pages, n, split, splits, ids_.data(),
                                         query_.data(), to, to_lse);
      if (count < 0) return -1;
      total += count;
    }
    float* result = results_.data();
    if (all > 1) {
      result += all * stride;
      merge_splits(h.row_heads, h.head_dim, all, results_.data(), stride, result, lse);
    }
    ring.store_values(result, ring.q_floats(), out);
    return total;
  }

 private:
  std::vector<int32_t> ids_;
  std::vector<float> query_, results_;
};

}  // namespace scout
