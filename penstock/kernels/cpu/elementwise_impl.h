// Norms and activations of one row, compiled once per instruction set. Arithmetic is in float32 throughout.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace penstock {
namespace PENSTOCK_ISA {

PENSTOCK_INLINE float square_root(float value) { return __builtin_sqrtf(value); }

template <typename T>
PENSTOCK_INLINE float inverse_rms(const T* x, int64_t width, float eps) {
  Floats sum[2] = {zeros(), zeros()};
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    for (int half = 0; half < 2; ++half) {
      const Floats v = load(x + i + half * kLanes);
      sum[half] = multiply_add(v, v, sum[half]);
    }
  }
  for (; i < width; i += kLanes) {
    const Floats v = load_some(x + i, width - i);
    sum[0] = multiply_add(v, v, sum[0]);
  }
  return 1.0f / square_root(reduce_sum(sum[0] + sum[1]) / static_cast<float>(width) + eps);
}

template <typename T, typename Weight>
static void scale_row(const T* x, const Weight* weight, float scale, int64_t width, T* y) {
  const Floats factor = broadcast(scale);
  for (int64_t i = 0; i < width; i += kLanes) {
    store_some(y + i, load_some(x + i, width - i) * factor * load_some(weight + i, width - i), width - i);
  }
}

template <typename T>
static void rms_norm_as(const ElementwiseArgs& args, const void* x, void* y) {
  const T* from = static_cast<const T*>(x);
  const float scale = inverse_rms(from, args.width, args.eps);
  T* to = static_cast<T*>(y);
  if (args.weight_dtype == Dtype::float32) {
    scale_row(from, static_cast<const float*>(args.weight), scale, args.width, to);
  } else {
    scale_row(from, static_cast<const bf16*>(args.weight), scale, args.width, to);
  }
}

[[maybe_unused]] static void rms_norm(const ElementwiseArgs& args, const void* x, void* y) {
  if (args.dtype == Dtype::float32) return rms_norm_as<float>(args, x, y);
  return rms_norm_as<bf16>(args, x, y);
}

template <typename T>
static void add_rms_norm_as(const ElementwiseArgs& args, const void* x, void* residual, void* y) {
  const T* add = static_cast<const T*>(x);
  T* sum = static_cast<T*>(residual);
  for (int64_t i = 0; i < args.width; i += kLanes) {
    const int64_t left = args.width - i;
    store_some(sum + i, load_some(sum + i, left) + load_some(add + i, left), left);
  }
  rms_norm_as<T>(args, sum, y);
}

[[maybe_unused]] static void add_rms_norm(const ElementwiseArgs& args, const void* x, void* residual, void* y) {
  if (args.dtype == Dtype::float32) return add_rms_norm_as<float>(args, x, residual, y);
  return add_rms_norm_as<bf16>(args, x, residual, y);
}

// The argument of the logistic function by which both activations multiply x: (1 + tanh(z)) / 2 = logistic(2z).
PENSTOCK_INLINE Floats logistic_argument(Activation activation, Floats x) {
  if (activation != Activation::gelu_tanh) return x;
  return broadcast(2 * 0.7978845608f) * multiply_add(broadcast(0.044715f), x * x * x, x);
}

PENSTOCK_INLINE Floats activate(Activation activation, Floats x) {
  return x / (broadcast(1.0f) + exponential(zeros() - logistic_argument(activation, x)));
}

// For bfloat16, to which the result is rounded.
PENSTOCK_INLINE Floats activate_roughly(Activation activation, Floats x) {
  const Floats inner = maximum(logistic_argument(activation, x), broadcast(-80.0f));  // so that the power is finite
  return x * reciprocal(broadcast(1.0f) + rough_exponential(zeros() - inner));
}

PENSTOCK_INLINE Floats activate_as(const float*, Activation activation, Floats x) { return activate(activation, x); }
PENSTOCK_INLINE Floats activate_as(const bf16*, Activation activation, Floats x) {
  return activate_roughly(activation, x);
}

template <typename T>
static void gated_as(Activation activation, int64_t width, const void* gate_up, void* y) {
  const T* gate = static_cast<const T*>(gate_up);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    const Floats active = activate_as(gate, activation, load_some(gate + i, left));
    store_some(static_cast<T*>(y) + i, active * load_some(gate + width + i, left), left);
  }
}

[[maybe_unused]] static void gated(Dtype dtype, Activation activation, int64_t width, const void* gate_up, void* y) {
  if (dtype == Dtype::float32) return gated_as<float>(activation, width, gate_up, y);
  return gated_as<bf16>(activation, width, gate_up, y);
}

[[maybe_unused]] static void widen(const bf16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store_some(to + i, load_some(from + i, count - i), count - i);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
