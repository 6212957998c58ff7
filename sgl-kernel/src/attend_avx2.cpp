#include "vec_avx2.h"

#include "attend_kernel.h"

namespace scout {

void attend_avx2(const AttendArgs& args) { attend_all(args); }

}  // namespace scout
