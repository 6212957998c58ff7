// Which instruction set the kernels use. A kernel without a variant for one uses the next lower.
#pragma once

namespace scout {

// Each is a superset of those before it: compare with >=.
enum class Isa : int { kAvx2 = 0, kAvx512 = 1, kAvx512Bf16 = 2 };
inline constexpr int kNumIsas = 3;

// Whether this machine and operating system support the least of them, without which nothing runs.
bool has_avx2();

// The best that they support.
Isa best_isa();

// What the kernels currently use: best_isa(), lowered by SCOUT_ISA (read once) or by set_isa.
Isa current_isa();

// Selects by name; false (and nothing changes) if the name is unknown or the machine cannot run it.
bool set_isa(const char* name);

const char* isa_name(Isa isa);

}  // namespace scout
