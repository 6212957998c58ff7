// Checksums of host pages, so that a flipped bit is found before it is attended to or copied.
//
// A word for each layer and page: 0 while the page is being filled, then kSealed and the CRC of its
// K and V. The server seals a page when all its tokens are there and clears the word when the page
// is freed, before anybody else may write to it. Whoever then finds other bytes sets kDamaged.
#pragma once

#include <cstdint>

#include "mapped_ring.h"

namespace scout {

constexpr uint64_t kSealed = 1ull << 32;
constexpr uint64_t kDamaged = 1ull << 33;

// CRC-32C of K followed by V of a page, `bytes` each, a multiple of 32, its 8-byte words in another
// order: words 0, 4, 8 .., then 1, 5, 9 .., then those from 2 and from 3. It finds any three
// flipped bits, and any number of them in 32 neighbouring bits of a word.
uint32_t page_checksum(const void* k, const void* v, uint64_t bytes);

// False if the page is not what it was when it was sealed. Says so once, in its word and Bell.
bool is_sound(const Ring& ring, uint32_t layer, int64_t page);

// Seals those of `pages` [n] that are not, in all layers. Ids are checked by the caller.
void seal_pages(const Ring& ring, const int64_t* pages, int64_t n, int threads);

// is_sound for n pages, whose results are in the words.
void check_pages(const Ring& ring, const int64_t* layers, const int64_t* pages, int64_t n,
                 int threads);

}  // namespace scout
