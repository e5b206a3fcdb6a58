// The passes over a whole row of logits, compiled once per instruction set.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace penstock {
namespace PENSTOCK_ISA {

static float find_maximum(const float* values, int64_t count) {
  Floats highest = broadcast(-__builtin_inff());
  Ints any_nan = broadcast_int(0);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats v = load(values + i);
    highest = maximum(v, highest);
    any_nan = any_nan | is_nan(v);
  }
  if (i < count) {
    const Floats v = load_some(values + i, count - i);  // the rest are zeros
    highest = maximum(keep_between(v, lane_indices(), 0, 0, count - i, -__builtin_inff()), highest);
    any_nan = any_nan | is_nan(v);
  }
  const bool has_nan = reduce_max(to_floats(shift_right(any_nan, 31))) != 0.0f;
  return has_nan ? __builtin_nanf("") : reduce_max(highest);
}

static bool scan_logits(const float* logits, int64_t vocabulary, float* block_maxima) {
  const Floats lowest = broadcast(-__builtin_inff());
  Ints any_nan = broadcast_int(0);
  for (int64_t start = 0; start < vocabulary; start += kSampleBlock) {
    const int64_t end = vocabulary - start < kSampleBlock ? vocabulary : start + kSampleBlock;
    Floats highest = lowest;
    for (int64_t i = start; i < end; i += kLanes) {
      Floats v;
      if (end - i >= kLanes) {
        v = load(logits + i);
      } else {
        v = keep_between(load_some(logits + i, end - i), lane_indices(), 0, 0, end - i, -__builtin_inff());
      }
      highest = maximum(v, highest);
      any_nan = any_nan | is_nan(v);
    }
    block_maxima[start / kSampleBlock] = reduce_max(highest);
  }
  return reduce_max(to_floats(shift_right(any_nan, 31))) == 0.0f;
}

static void weigh_logits(const float* logits, int64_t vocabulary, float top, float inverse_temperature, float lowest,
                         float* weights, float* block_sums) {
  const Floats shift = broadcast(top), factor = broadcast(inverse_temperature);
  for (int64_t start = 0; start < vocabulary; start += kSampleBlock) {
    const int64_t end = vocabulary - start < kSampleBlock ? vocabulary : start + kSampleBlock;
    Floats sum = zeros();
    for (int64_t i = start; i < end; i += kLanes) {
      const Floats scaled = (load_some(logits + i, end - i) - shift) * factor;
      const Floats weight = zero_below(exponential(scaled), lowest);
      store_some(weights + i, weight, end - i);
      sum = sum + keep_between(weight, lane_indices(), 0, 0, end - i, 0.0f);
    }
    block_sums[start / kSampleBlock] = reduce_sum(sum);
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
