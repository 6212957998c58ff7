#define SCOUT_STORAGE SCOUT_FLOATS  // int8 pages: attend_cpu_avx512vnni.cpp
#include "vec_avx512.h"

#include "attend_kernel.h"

namespace scout {

void attend_avx512(const AttendArgs& args) { attend_all(args); }

}  // namespace scout
