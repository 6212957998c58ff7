#include "vec_portable.h"

#include "attend_int8.h"
#include "attend_kernel.h"

namespace scout {

void attend_portable(const AttendArgs& args) { attend_all(args); }
void attend_int8_portable(const AttendArgs& args) { attend_all_codes(args); }

}  // namespace scout
