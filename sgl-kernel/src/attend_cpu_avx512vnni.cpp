// Pages of int8, with VNNI: without its fused product and sum the compiler runs out of registers.
#include "vec_avx512.h"

#include "attend_int8.h"

namespace scout {

void attend_int8_avx512vnni(const AttendArgs& args) { attend_all_codes(args); }

}  // namespace scout
