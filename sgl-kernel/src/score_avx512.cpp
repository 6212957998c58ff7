#include "vec_avx512.h"

#include "rotate_kernel.h"
#include "rotated_kernel.h"
#include "score_kernel.h"

namespace scout {

void score_avx512(const Digests& digests, const ScoreArgs& args) { score_all(digests, args); }

void score_rotated_avx512(const RotatedDigests& digests, const ScoreArgs& args) {
  score_rotated_all(digests, args);
}

void rotate_pages_avx512(const RotateArgs& args) { rotate_all(args); }

}  // namespace scout
