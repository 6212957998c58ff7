#include "vec_portable.h"

#include "quantize_kernel.h"

namespace scout {

void quantize_portable(const QuantizeArgs& args) { quantize_all(args); }

}  // namespace scout
