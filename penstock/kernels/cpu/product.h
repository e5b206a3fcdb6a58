// A matrix product with what comes right before and after it, so that neither takes a pass of its own over memory.
#pragma once

#include "kernels.h"
#include "linear.h"

namespace penstock {

// The rows that go into a product: as they are given, or made on the way.
struct InputRows {
  enum class Origin { given, packed, normed, gated };
  Origin origin;
  const void* data;  // [rows][in_features], twice as wide where gated; as pack_activations leaves it where packed
  ElementwiseArgs norm = {};
  Activation activation = Activation::silu;

  static InputRows given(const void* rows) { return {Origin::given, rows}; }
  static InputRows packed(const void* tiles) { return {Origin::packed, tiles}; }
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

// Whether multiply_gated can do this (gate and up side by side in the same strips, in bfloat16 on the right machine)
// and there are rows enough to fill its vectors.
bool gates_on_the_way(const Linear& gate_up, Dtype dtype, int64_t rows);

// activation(gate) × up, packed for the next product.
void multiply_gated(const Linear& gate_up, int64_t rows, const InputRows& in, Activation activation, bf16* out);

}  // namespace penstock
