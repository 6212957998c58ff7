#include "vec_avx2.h"

#include "quantize_kernel.h"

namespace scout {

void quantize_avx2(const QuantizeArgs& args) { quantize_all(args); }

}  // namespace scout
