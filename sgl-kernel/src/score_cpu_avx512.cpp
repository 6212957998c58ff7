#include "vec_avx512.h"

#include "score_kernel.h"

namespace scout {

void score_avx512(const ScoreArgs& args) { score_all(args); }

}  // namespace scout
