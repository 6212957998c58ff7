#include "isa.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace scout {
namespace {

constexpr const char* kNames[kNumIsas] = {"avx2", "avx512", "avx512bf16"};

int find_runnable(const char* name) {
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
    if (std::strcmp(name, kNames[i]) == 0) return i;
  }
  return -1;
}

int initial_isa() {
  const int best = static_cast<int>(best_isa());
  const char* wanted = std::getenv("SCOUT_ISA");
  if (wanted == nullptr || *wanted == '\0') return best;
  const int found = find_runnable(wanted);
  if (found >= 0) return found;
  std::fprintf(stderr,
               "sglang-scout: SCOUT_ISA=%s is unknown or not supported by this CPU; using %s\n",
               wanted, kNames[best]);
  return best;
}

std::atomic<int>& selected() {
  static std::atomic<int> isa{initial_isa()};
  return isa;
}

}  // namespace

// These also check (XGETBV) that the operating system saves the wide registers.
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

Isa best_isa() {
#ifdef SCOUT_AVX512
  if (has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")
               ? Isa::kAvx512Bf16
               : Isa::kAvx512;
  }
#endif
  return Isa::kAvx2;
}

Isa current_isa() { return static_cast<Isa>(selected().load(std::memory_order_relaxed)); }

bool set_isa(const char* name) {
  const int found = find_runnable(name);
  if (found < 0) return false;
  selected().store(found, std::memory_order_relaxed);
  return true;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace scout
