// A matrix product with what comes right before and after it, so that neither takes a pass of its own over memory.
#pragma once

#include "kernels.h"
#include "linear.h"

namespace penstock {

// The rows that go into a product: as they are given, or made on the way.
struct InputRows {
  enum class Origin { given, normed, gated };
  Origin origin;
  const void* data;  // [rows][in_features]; twice as wide where gated
  ElementwiseArgs norm = {};
  Activation activation = Activation::silu;

  static InputRows given(const void* rows) { return {Origin::given, rows}; }
  static InputRows normed(const void* rows, const ElementwiseArgs& norm) { return {Origin::normed, rows, norm}; }
  static InputRows gated(const void* gate_up, Activation activation) {
    return {Origin::gated, gate_up, {}, activation};
  }
};

struct OutputRows {
  void* data;
  Dtype dtype;
  bool adds = false;  // to what is there; the product is rounded first, as if it had been written and then added
};

void multiply(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, const OutputRows& out);

}  // namespace penstock
