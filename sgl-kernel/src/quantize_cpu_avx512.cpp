#include "vec_avx512.h"

#include "quantize_kernel.h"

namespace scout {

void quantize_avx512(const QuantizeArgs& args) { quantize_all(args); }

}  // namespace scout
