#include "vec_portable.h"

#include "attend_kernel.h"

namespace scout {

void attend_portable(const AttendArgs& args) { attend_all(args); }

}  // namespace scout
