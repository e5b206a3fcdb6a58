// Functions of sixteen lanes: exponentials, reciprocals, the hyperbolic tangent. Compiled once per instruction set.
#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr float kLog2OfE = 1.44269504f;

PENSTOCK_INLINE FloatRegister on_line(FloatRegister x, float slope, float start) {
  return fused_multiply_add(x, FloatRegister{} + slope, FloatRegister{} + start);
}

// e^x to about one unit in the last place; 0 below the smallest normal result, NaN for NaN. Without kMayOverflow, x is
// at most 88.
template <bool kMayOverflow = true>
PENSTOCK_INLINE FloatRegister exponential_of(FloatRegister x) {
  constexpr float kLowest = -87.33f;
#if PENSTOCK_REGISTER_BYTES == 64
  const FloatRegister n = (FloatRegister)_mm512_roundscale_ps((__m512)(x * kLog2OfE), 0);
#else
  constexpr float kHighest = 88.7f;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const FloatRegister bounded = kMayOverflow ? (x > kHighest ? FloatRegister{} + kHighest : x) : x;
  const FloatRegister shifted = on_line(bounded, kLog2OfE, kRounder);
  const FloatRegister n = shifted - kRounder;
#endif
  FloatRegister r = fused_multiply_add(n, FloatRegister{} - 0.693359375f, x);
  r = fused_multiply_add(n, FloatRegister{} + 2.12194440e-4f, r);
  const FloatRegister square = r * r;
  FloatRegister p = on_line(r, 1.9875691500e-4f, 1.3981999507e-3f);
  p = fused_multiply_add(p, square, on_line(r, 8.3334519073e-3f, 4.1665795894e-2f));
  p = fused_multiply_add(p, square, on_line(r, 1.6666665459e-1f, 5.0000001201e-1f));
  p = fused_multiply_add(p, square, r + 1.0f);
#if PENSTOCK_REGISTER_BYTES == 64
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
  return (FloatRegister)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  const FloatRegister power = (FloatRegister)(((IntRegister)shifted - (0x4b400000 - 127)) << 23);
  return x < kLowest ? FloatRegister{} : p * power;
#endif
}

template <bool kMayOverflow = true>
PENSTOCK_INLINE Floats exponential(Floats x) {
  Floats out;
  FOR_PARTS out.part[i] = exponential_of<kMayOverflow>(x.part[i]);
  return out;
}

// 2^x with a relative error of about 10^-4, for results that are rounded to bfloat16; 0 for -infinity, NaN for NaN.
PENSTOCK_INLINE Floats rough_power_of_two(Floats x) {
#if PENSTOCK_REGISTER_BYTES == 64
  constexpr int kMinusFloor = 0x09;
  const FloatRegister r = (FloatRegister)_mm512_reduce_ps((__m512)x.part[0], kMinusFloor);
  FloatRegister p = FloatRegister{} + 7.80245212e-2f;
  p = p * r + 2.26067158e-1f;
  p = p * r + 6.95833540e-1f;
  p = p * r + 9.99925219e-1f;
  Floats out;
  out.part[0] = (FloatRegister)_mm512_scalef_ps((__m512)p, (__m512)x.part[0]);  // which takes the floor itself
  return out;
#else
  return exponential(x * broadcast(1.0f / kLog2OfE));
#endif
}

PENSTOCK_INLINE Floats rough_exponential(Floats x) { return rough_power_of_two(x * broadcast(kLog2OfE)); }

// 1 / x with a relative error of about 10^-7, for finite x other than zero.
PENSTOCK_INLINE Floats reciprocal(Floats x) {
#if PENSTOCK_REGISTER_BYTES == 64
  const FloatRegister near = (FloatRegister)_mm512_rcp14_ps((__m512)x.part[0]);
  Floats out;
  out.part[0] = near * (2.0f - x.part[0] * near);
  return out;
#else
  return broadcast(1.0f) / x;
#endif
}

PENSTOCK_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats one = broadcast(1.0f);
  return one - broadcast(2.0f) / (exponential(x + x) + one);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
