#include "vec_avx2.h"

#include "score_kernel.h"
#include "sign_kernel.h"

namespace scout {

void score_avx2(const ScoreArgs& args) { score_all(args); }

void score_signs_avx2(const SignArgs& args) { score_signs_all(args); }

}  // namespace scout
