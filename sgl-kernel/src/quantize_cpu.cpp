#include "quantize_cpu.h"

#include "isa.h"

namespace scout {

void quantize_planes(const QuantizeArgs& args) {
#ifdef SCOUT_X86
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512 && args.head_dim % 32 == 0) return quantize_avx512(args);
  if (isa != Isa::kPortable) return quantize_avx2(args);
#endif
  quantize_portable(args);
}

}  // namespace scout
