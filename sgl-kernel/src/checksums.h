// Checksums of host pages, so that a flipped bit is detected before the page is read or copied.
//
// One word per layer and page: 0 while the page is being filled, then, until it is freed, kSealed
// and the CRC of its K and V. A reader that detects a mismatch sets kDamaged.
#pragma once

#include <cstdint>

#include "mapped_ring.h"

namespace scout {

constexpr uint64_t kSealed = 1ull << 32;
constexpr uint64_t kDamaged = 1ull << 33;

// CRC-32C of K followed by V of a page, `bytes` each, a multiple of 32, with 8-byte words permuted:
// words 0, 4, 8 .., then 1, 5, 9 .., then those from 2 and from 3. It detects any three flipped
// bits, and any burst within 32 adjacent bits of a word.
uint32_t page_checksum(const void* k, const void* v, uint64_t bytes);

// False if the page has changed since it was sealed. Reported once, in its word and in Bell.
bool is_sound(const Ring& ring, uint32_t layer, int64_t page);

// Seals those of `pages` [n] that are not sealed yet, in all layers. The caller checks ids.
void seal_pages(const Ring& ring, const int64_t* pages, int64_t n, int threads);

// is_sound for n pages; the results are in their words.
void check_pages(const Ring& ring, const int64_t* layers, const int64_t* pages, int64_t n,
                 int threads);

}  // namespace scout
