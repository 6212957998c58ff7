#include "vec_avx512.h"

#include "score_kernel.h"
#include "sign_kernel.h"

namespace scout {

void score_avx512(const ScoreArgs& args) { score_all(args); }

void score_signs_avx512(const SignArgs& args) { score_signs_all(args); }

}  // namespace scout
