#include "vec_avx512.h"

#include "attend_kernel.h"

namespace scout {

void attend_avx512(const AttendArgs& args) { attend_all(args); }

}  // namespace scout
