#include "vec_portable.h"

#include "rotate_kernel.h"
#include "rotated_kernel.h"
#include "score_kernel.h"

namespace scout {

void score_portable(const Digests& digests, const ScoreArgs& args) { score_all(digests, args); }

void score_rotated_portable(const RotatedDigests& digests, const ScoreArgs& args) {
  score_rotated_all(digests, args);
}

void rotate_pages_portable(const RotateArgs& args) { rotate_all(args); }

}  // namespace scout
