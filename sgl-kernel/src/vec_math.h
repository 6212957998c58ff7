// exp2 on Vec. Include a vec_*.h first.
#pragma once

namespace scout {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr double kLn2 = 0.693147180559945309417;
constexpr float kInfinity = __builtin_inff();
// Scores are clamped here, so that differences of scores are never inf - inf.
constexpr float kScoreLimit = 1e38f;

// 2^x for x <= 0; 0 below -126. Relative error < 1e-7 (polynomial 1.6e-8, the rest rounding);
// exactly 1 at 0. NaN stays NaN.
inline Vec::F exp2_nonpositive(Vec::F x) {
  Vec::F r;
  const Vec::F power = Vec::exp2_split(Vec::max(Vec::set1(-126.0f), x), r);
  Vec::F p = Vec::set1(0x1.41fbbcp-13f);
  p = Vec::fma(p, r, Vec::set1(0x1.5f3e54p-10f));
  p = Vec::fma(p, r, Vec::set1(0x1.3b2d4cp-7f));
  p = Vec::fma(p, r, Vec::set1(0x1.c6aee8p-5f));
  p = Vec::fma(p, r, Vec::set1(0x1.ebfbdcp-3f));
  p = Vec::fma(p, r, Vec::set1(0x1.62e430p-1f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  return Vec::zero_below(Vec::scale_by(p, power), x, -126.0f);
}

// The same with a relative error < 1e-4, for estimates.
inline Vec::F exp2_rough(Vec::F x) {
  Vec::F r;
  const Vec::F power = Vec::exp2_split(Vec::max(Vec::set1(-126.0f), x), r);
  Vec::F p = Vec::set1(0x1.c3f6a6p-5f);
  p = Vec::fma(p, r, Vec::set1(0x1.f0de36p-3f));
  p = Vec::fma(p, r, Vec::set1(0x1.62f31ep-1f));
  p = Vec::fma(p, r, Vec::set1(0x1.fff692p-1f));
  return Vec::scale_by(p, power);
}

// Never faults.
inline void prefetch(const char* p) { __builtin_prefetch(p, 0, Vec::kPrefetchLocality); }

}  // namespace
}  // namespace scout
