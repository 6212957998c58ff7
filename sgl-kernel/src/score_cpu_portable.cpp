#include "vec_portable.h"
// (the vector type comes first)
#include "score_kernel.h"

namespace scout {

void score_portable(const ScoreArgs& args) { score_all(args); }

}  // namespace scout
