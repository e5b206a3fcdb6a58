// How a product's sums reach memory, compiled once per instruction set.
#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

template <typename Element>
PENSTOCK_INLINE void write_as(Element* to, Floats sum, int64_t count, bool adds) {
  if (adds) {
    Element rounded[kLanes];
    store(rounded, sum);
    sum = load(rounded) + load_some(to, count);
  }
  store_some(to, sum, count);
}

// `count` of 16 neighbouring outputs of one row.
template <typename Call>
PENSTOCK_INLINE void write_outputs(const Call& call, int64_t row, int64_t output, int64_t count, Floats sum) {
  const int64_t at = row * call.out_features + output;
  if (call.bias != nullptr) sum = sum + load(call.bias + output);
  if (call.y_dtype == Dtype::float32) return write_as(static_cast<float*>(call.y) + at, sum, count, call.adds);
  return write_as(static_cast<bf16*>(call.y) + at, sum, count, call.adds);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
