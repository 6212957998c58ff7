// int8 copies of host pages (cpu_pages = int8): made when a page is first needed, read from then
// on.
//
// What is attended to are always the int8 codes of a page: those in its copy, or the same codes
// made anew. Quantising is a function of the page alone, so a result depends neither on who
// computes it nor on what was computed before.
//
//   page word  [P]     the page's generation; odd while the page is final: full, and not to change
//                      until it is released. Written by the producer only.
//   copy word  [L, P]  generation << 26 | writer << 2 | state
//   copy       [L, P]  K codes [S, H, D], V codes, K scales [H], V scales
//
// A copy holds if its state is ready and its generation is that of a final page. Otherwise a thread
// may claim it by compare-and-swap (state writing), write it and store ready with the generation
// that it read before. Whoever meets a copy that another one is writing makes the codes in memory
// of its own, and does not wait: the other may be stopped.
//
// What a thread can do that is late, so that its record was given up:
//   - It claims or writes a copy of a page that has been released since. What it stores as ready
//     has the old generation, so the copy does not hold. Until it stores that, its claim keeps
//     everybody else from writing there. So nothing of it can appear in another one's copy.
//   - It reads a copy that is written again. Nobody waits for its answer.
//   - It cannot claim a copy that is ready for a later generation than it knows. It reads the copy
//     word before the page word, and a copy word of some generation was written after the page word
//     had it. If the copy word changes after that, the swap fails.
//
// The writer is the number of the worker's life, or kCaller. A claim of another life is of a dead
// process and may be taken over; one of the caller only by a caller, of which there is one at a
// time. test/worker/test_page_copies_model.py searches all interleavings.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "quantize_cpu.h"
#include "ring.h"
#include "test_points.h"

namespace scout {

constexpr uint32_t kCaller = 0;           // no life of a worker has this number
constexpr uint32_t kReader = UINT32_MAX;  // of who reads copies and makes none
constexpr int kGenerationShift = 26;
constexpr uint64_t kGenerationMask = (1ull << 38) - 1;

enum class CopyState : uint64_t { kNone = 0, kWriting = 1, kReady = 2 };

inline uint64_t copy_word(uint64_t generation, uint32_t writer, CopyState state) {
  return (generation & kGenerationMask) << kGenerationShift | uint64_t{writer & 0xffffffu} << 2 |
         static_cast<uint64_t>(state);
}
inline bool is_ready(uint64_t word, uint64_t generation) {
  return (word & 3) == static_cast<uint64_t>(CopyState::kReady) &&
         word >> kGenerationShift == (generation & kGenerationMask);
}
inline bool is_final(uint64_t generation) { return generation % 2 == 1; }

// Whether `writer` may claim a copy whose word is `word`, and that does not hold.
inline bool is_free(uint64_t word, uint32_t writer) {
  const uint32_t holder = static_cast<uint32_t>(word >> 2 & 0xffffff);
  if (writer == kReader) return false;
  if ((word & 3) != static_cast<uint64_t>(CopyState::kWriting)) return true;
  return writer == kCaller ? holder == kCaller : holder != kCaller && holder != writer;
}

// One thread's way to the int8 codes of pages.
class PageCopies {
 public:
  // Throws std::bad_alloc. The memory for codes of its own costs nothing until it is needed.
  PageCopies(const Ring& ring, uint32_t writer)
      : ring_(ring), writer_(writer), stride_(ring.header().copy_stride) {
    const uint64_t most = ring.header().max_pages;
    own_.reset(static_cast<int8_t*>(std::aligned_alloc(64, most * stride_)));
    if (!own_) throw std::bad_alloc();
    records_.resize(most);
  }

  // Codes of pages[0, n), at most max_pages ids that have been checked; good until the next call.
  const int8_t* const* find(uint32_t layer, const int32_t* pages, int32_t n) {
    uint64_t used = 0;
    for (int32_t i = 0; i < n; ++i) {
      records_[i] = find_copy(layer, pages[i]);
      if (records_[i] != nullptr) continue;
      int8_t* const own = own_.get() + used++ * stride_;
      quantize(layer, pages[i], own);
      records_[i] = own;
    }
    return records_.data();
  }

  // Pages quantised since the last call.
  uint64_t take_quantized() { return std::exchange(quantized_, 0); }

 private:
  // The copy, made here if it did not hold; nullptr if it does not and cannot be made now.
  const int8_t* find_copy(uint32_t layer, int32_t page) {
    uint64_t* const at = ring_.copy_word(layer, page);
    uint64_t word = load_acquire(at);  // before the page word, see above
    const uint64_t generation = load_acquire(ring_.page_word(page));
    if (!is_final(generation)) return nullptr;
    int8_t* const copy = ring_.copy(layer, page);
    if (is_ready(word, generation)) return copy;
    if (!is_free(word, writer_) ||
        !__atomic_compare_exchange_n(at, &word, copy_word(generation, writer_, CopyState::kWriting),
                                     false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
      return nullptr;
    SCOUT_POINT(kCopyClaimed, layer * static_cast<uint32_t>(ring_.header().num_pages) + page);
    quantize(layer, page, copy);
    SCOUT_POINT(kCopyWritten, layer * static_cast<uint32_t>(ring_.header().num_pages) + page);
    store_release(at, copy_word(generation, writer_, CopyState::kReady));
    // If the page was released meanwhile, the record is one that nobody waits for.
    return copy;
  }

  void quantize(uint32_t layer, int32_t page, int8_t* to) {
    const KvPages kv = ring_.kv(layer);
    const int64_t codes = int64_t{kv.page_size} * kv.kv_heads * kv.head_dim;
    float* const scales = reinterpret_cast<float*>(to + 2 * codes);
    const int64_t from = page, first = 0;
    QuantizeArgs args{kv.k,   kv.dtype, kv.page_size, kv.kv_heads, kv.head_dim, &from,
                      &first, 1,        to,           scales};
    quantize_pages(args);
    args.src = kv.v;
    args.codes = to + codes;
    args.scales = scales + kv.kv_heads;
    quantize_pages(args);
    ++quantized_;
  }

  struct Freed {
    void operator()(int8_t* p) const { std::free(p); }
  };
  const Ring& ring_;
  uint32_t writer_;
  uint64_t stride_;
  uint64_t quantized_ = 0;
  std::unique_ptr<int8_t[], Freed> own_;  // max_pages records
  std::vector<const int8_t*> records_;
};

// The producer's part. Final: the pages are full and stay as they are until they are not final any
// more; then no copy of them holds. Idempotent; nothing without int8 copies. Throws
// std::invalid_argument, before any change, for an id out of range.
inline void set_final(const Ring& ring, const int64_t* pages, int64_t n, bool final) {
  if (!ring.has_copies()) return;
  const int64_t count = ring.header().num_pages;
  for (int64_t i = 0; i < n; ++i) {
    if (pages[i] < 0 || pages[i] >= count)
      throw std::invalid_argument("page " + std::to_string(pages[i]) + " is outside 0.." +
                                  std::to_string(count - 1));
  }
  for (int64_t i = 0; i < n; ++i) {
    uint64_t* const word = ring.page_word(pages[i]);
    const uint64_t generation = load_relaxed(word);
    if (is_final(generation) != final) store_release(word, generation + 1);
  }
}

}  // namespace scout
