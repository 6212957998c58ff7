// Attention of one row of a record, part by part: shared by worker threads and the producer.
#pragma once

#include <cmath>
#include <cstdint>

#include "ring.h"

namespace scout {

// Attends to one part of a row's pages: run `part % parts` of those of node `part / parts`.
// `scratch` [max_pages] takes their ids: they are read once, checked and then used, so a record
// that changes meanwhile cannot lead outside the arena. Returns the number of pages, or -1 if a
// count or an id is out of range (then nothing is written). Of several parts of a row one without
// pages writes its lse alone.
inline int32_t attend_part(const Ring& ring, uint32_t layer, const float* q, const int32_t* pages,
                           int32_t n, uint32_t part, uint32_t parts, int32_t* scratch, float* out,
                           float* lse) {
  const Header& h = ring.header();
  if (n < 0 || n > static_cast<int32_t>(h.max_pages)) return -1;
  const int64_t first = int64_t{h.stripe_pages} * (part / parts);
  const int64_t end = first + h.stripe_pages;
  const uint32_t run = part % parts;
  int32_t listed = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t id = load_relaxed(pages + i);
    if (id >= h.num_pages) return -1;
    if (id < 0 || (id >= first && id < end)) scratch[listed++] = id;
  }
  const int32_t lo = static_cast<int32_t>(int64_t{listed} * run / parts);
  const int32_t hi = static_cast<int32_t>(int64_t{listed} * (run + 1) / parts);
  int32_t count = 0;
  for (int32_t i = lo; i < hi; ++i)
    if (scratch[i] >= 0) scratch[count++] = scratch[i];
  if (count == 0 && parts * h.num_nodes > 1) {  // one of several: `out` is not looked at
    for (uint32_t head = 0; head < h.q_heads; ++head) lse[head] = -INFINITY;
    return 0;
  }
  attend_sequence(ring.kv(layer), ring.params(), q, scratch, count, -1, 0, out, lse);
  return count;
}

}  // namespace scout
