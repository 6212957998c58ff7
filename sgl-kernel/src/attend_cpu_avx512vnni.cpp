// Pages of int8, with VNNI: without its fused product and sum the compiler runs out of registers.
#define SCOUT_STORAGE SCOUT_CODES
#include "vec_avx512.h"

#include "attend_kernel.h"

namespace scout {

void attend_int8_avx512vnni(const AttendArgs& args) { attend_all(args); }

}  // namespace scout
