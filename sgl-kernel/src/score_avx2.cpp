#include "vec_avx2.h"

#include "rotate_kernel.h"
#include "rotated_kernel.h"
#include "score_kernel.h"

namespace scout {

void score_avx2(const Digests& digests, const ScoreArgs& args) { score_all(digests, args); }

void score_rotated_avx2(const RotatedDigests& digests, const ScoreArgs& args) {
  score_rotated_all(digests, args);
}

void rotate_pages_avx2(const RotateArgs& args) { rotate_all(args); }

}  // namespace scout
