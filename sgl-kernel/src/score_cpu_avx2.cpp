#include "vec_avx2.h"

#include "score_kernel.h"

namespace scout {

void score_avx2(const ScoreArgs& args) { score_all(args); }

}  // namespace scout
