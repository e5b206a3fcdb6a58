// A matrix product together with the operations before and after it, which then need no separate pass over memory.
#pragma once

#include "kernels.h"
#include "largest.h"
#include "linear.h"
#include "pool.h"

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
  bool adds = false;  // whether the product is added to the data; the product is rounded before
};

int64_t element_bytes(Dtype dtype);

// One row of `in`, which is not packed; given rows are where they are.
void make_row(const InputRows& in, Dtype dtype, int64_t width, int64_t row, void* to);

constexpr int64_t kPackRows = 16;

// body(first row, number of rows) for every `block_rows` rows; few elements stay on the calling thread.
template <typename Body>
void for_row_blocks(int64_t rows, int64_t width, Body&& body, int64_t block_rows = kPackRows) {
  constexpr int64_t serial_elements = 4096;
  const auto one = [&](int64_t block) {
    const int64_t first = block * block_rows, left = rows - first;
    body(first, left < block_rows ? left : block_rows);
  };
  const int64_t blocks = ceil_div(rows, block_rows);
  if (rows * width > serial_elements) return parallel_for(blocks, one, num_threads());
  for (int64_t block = 0; block < blocks; ++block) one(block);
}

void multiply(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, const OutputRows& out);

// Passes the results of `multiply`, in float32, to `out` piece by piece.
void find_largest(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, LargestOutputs* out);

// Whether multiply_gated supports this product (gate and up side by side in the same strips, in bfloat16 on the right
// machine) and there are rows enough to fill its vectors.
bool gates_on_the_way(const Linear& gate_up, Dtype dtype, int64_t rows);

// activation(gate) × up, packed for the next product.
void multiply_gated(const Linear& gate_up, int64_t rows, const InputRows& in, Activation activation, bf16* out);

// The same four for matrices that are multiplied in whole numbers. Gated rows are written in `dtype`.
void multiply_integers(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, const OutputRows& out);
void find_largest_integers(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, LargestOutputs* out);
bool gates_integers(const Linear& gate_up);
void multiply_gated_integers(const Linear& gate_up, Dtype dtype, int64_t rows, const InputRows& in,
                             Activation activation, void* out);

}  // namespace penstock
