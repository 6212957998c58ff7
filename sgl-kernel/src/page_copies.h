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
//   copy       [L, P]  codes and scales, an Int8Record (scout/attend.h)
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
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "quantize_cpu.h"
#include "ring.h"
#include "scout/attend.h"
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
class PageCopies final : public Int8Records {
 public:
  // Throws std::bad_alloc.
  PageCopies(const Ring& ring, uint32_t writer) : ring_(ring), writer_(writer) {
    own_.reset(static_cast<int8_t*>(std::aligned_alloc(64, ring.header().copy_stride)));
    if (!own_) throw std::bad_alloc();
  }

  // Makes records 0 to n - 1 those of pages[0, n), ids that have been checked and stay there.
  void list(uint32_t layer, const int32_t* pages, int32_t n) {
    layer_ = layer;
    pages_ = pages;
    count_ = n;
  }

  Int8Record get(int32_t i) override {
    const int32_t page = pages_[i];
    uint64_t* const at = ring_.copy_word(layer_, page);
    uint64_t word = load_acquire(at);  // before the page word, see above
    const uint64_t generation = load_acquire(ring_.page_word(page));
    int8_t* const copy = ring_.copy(layer_, page);
    if (is_final(generation) && is_ready(word, generation)) return {copy, false};
    const bool claimed =
        is_final(generation) && is_free(word, writer_) &&
        __atomic_compare_exchange_n(at, &word, copy_word(generation, writer_, CopyState::kWriting),
                                    false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    if (!claimed) {
      quantize(i, nullptr);
    } else {
      SCOUT_POINT(kCopyClaimed, layer_ * static_cast<uint32_t>(ring_.header().num_pages) + page);
      quantize(i, copy);
      SCOUT_POINT(kCopyWritten, layer_ * static_cast<uint32_t>(ring_.header().num_pages) + page);
      store_release(at, copy_word(generation, writer_, CopyState::kReady));
      // If the page was released meanwhile, the record is one that nobody waits for.
    }
    return {own_.get(), true};
  }

  const int8_t* first(int32_t i) const override {
    const int32_t page = pages_[i];
    if (holds(page)) return ring_.copy(layer_, page);
    const KvPages kv = ring_.kv(layer_);
    return static_cast<const int8_t*>(kv.k) + page * plane_bytes(kv);
  }

  // Pages quantised since the last call.
  uint64_t take_quantized() { return std::exchange(quantized_, 0); }

 private:
  // Whether the page has a copy, for who only wants to prefetch.
  bool holds(int32_t page) const {
    const uint64_t generation = load_relaxed(ring_.page_word(page));
    return is_final(generation) &&
           is_ready(load_relaxed(ring_.copy_word(layer_, page)), generation);
  }

  static int64_t plane_bytes(const KvPages& kv) {
    return int64_t{kv.page_size} * kv.kv_heads * kv.head_dim * (kv.dtype == DType::kF32 ? 4 : 2);
  }

  // Record i, into memory that stays cached from page to page, to be attended to at once; and into
  // `copy` if that is not null.
  void quantize(int32_t i, int8_t* copy) {
    const KvPages kv = ring_.kv(layer_);
    const int32_t page = pages_[i];
    const int64_t codes = int8_record_bytes(kv) - 2 * kv.kv_heads * sizeof(float);
    const int64_t from = page * plane_bytes(kv);
    float* const scales = reinterpret_cast<float*>(own_.get() + codes);
    QuantizePlane planes[2];
    add_planes_of_page(static_cast<const char*>(kv.k) + from, static_cast<const char*>(kv.v) + from,
                       kv, own_.get(), scales, copy, planes);
    // Of the next page V: while this one is attended to, its K is prefetched (attend_int8.h).
    const void* ahead = nullptr;
    if (i + 1 < count_ && !holds(pages_[i + 1]))
      ahead = static_cast<const char*>(kv.v) + pages_[i + 1] * plane_bytes(kv);
    quantize_planes({kv.dtype, kv.page_size, kv.kv_heads, kv.head_dim, planes, 2, ahead});
    if (copy != nullptr) std::memcpy(copy + codes, scales, 2 * kv.kv_heads * sizeof(float));
    ++quantized_;
  }

  struct Freed {
    void operator()(int8_t* p) const { std::free(p); }
  };
  const Ring& ring_;
  uint32_t writer_;
  uint32_t layer_ = 0;
  int32_t count_ = 0;
  const int32_t* pages_ = nullptr;
  uint64_t quantized_ = 0;
  std::unique_ptr<int8_t[], Freed> own_;  // a record
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
