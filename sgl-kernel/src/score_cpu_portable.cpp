#include "vec_portable.h"

#include "score_kernel.h"
#include "sign_kernel.h"

namespace scout {

void score_portable(const ScoreArgs& args) { score_all(args); }

void score_signs_portable(const SignArgs& args) { score_signs_all(args); }

}  // namespace scout
