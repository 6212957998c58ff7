// Attention of a batch by the threads of this process, not by the worker.
#pragma once

#include <cstdint>

#include "scout/attend.h"

namespace scout {

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

// Where whole sequences would leave threads idle, several share one (split.h); so the number of
// threads decides the order of sums. Page ids and
// lengths have been checked.
void attend_batch(const KvPages& kv, const AttendParams& params, const AttendBatch& of,
                  int threads);

}  // namespace scout
