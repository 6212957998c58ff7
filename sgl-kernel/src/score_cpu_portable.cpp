#include "vec_portable.h"

#include "score_kernel.h"

namespace scout {

void score_portable(const ScoreArgs& args) { score_all(args); }

}  // namespace scout
