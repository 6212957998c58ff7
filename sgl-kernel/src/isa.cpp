#include "isa.h"

#include <cpuid.h>

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

// Not __builtin_cpu_supports: where Zig compiles, as for the wheels, it is always false.
struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Leaf cpuid(unsigned leaf, unsigned part = 0) {
  Leaf found;
  __get_cpuid_count(leaf, part, &found.a, &found.b, &found.c, &found.d);
  return found;
}

bool all(unsigned found, unsigned wanted) { return (found & wanted) == wanted; }

// Whether the operating system saves registers: 0x06 means 256-bit ones, 0xe6 also 512-bit ones.
bool saves(unsigned registers) {
  if (!(cpuid(1).c & bit_OSXSAVE)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return all(low, registers);
}

}  // namespace

bool has_avx2() {
  return saves(0x06) && all(cpuid(1).c, bit_AVX | bit_FMA | bit_F16C) && all(cpuid(7).b, bit_AVX2);
}

Isa best_isa() {
#ifdef SCOUT_AVX512
  constexpr unsigned kWide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  const Leaf seven = cpuid(7);
  if (has_avx2() && saves(0xe6) && all(seven.b, kWide)) {
    const bool bf16 = all(cpuid(7, 1).a, bit_AVX512BF16) && all(seven.c, bit_AVX512VBMI);
    return bf16 ? Isa::kAvx512Bf16 : Isa::kAvx512;
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
