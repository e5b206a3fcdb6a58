// The functions that exist once per instruction set, and the table that picks one set at run time.
#pragma once

#include "attention.h"
#include "common.h"
#include "integer.h"
#include "linear.h"

namespace penstock {

constexpr int kSampleBlock = 64;

// From the least to the best, on one kind of processor. Mirrored in library.py.
enum class Isa : int32_t { generic, neon_dot, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx };
constexpr int32_t kNumIsas = 8;

struct ElementwiseArgs {
  Dtype dtype;
  int64_t width;
  float eps;
  Dtype weight_dtype;
  const void* weight;
};

// The form in which a product in bfloat16 reads activations.
enum class Activations {
  widened,      // to float32
  padded_bf16,  // rows filled up with zeros to whole tiles
  tiles,        // `pack_activations` of every 16 rows; a single row as it is
};

struct Kernels {
  // Called on the calling thread at the start of every operation that multiplies matrices.
  void (*enter)();

  // One row each.
  void (*rms_norm)(const ElementwiseArgs&, const void* x, void* y);
  void (*add_rms_norm)(const ElementwiseArgs&, const void* x, void* residual, void* y);
  void (*gated)(Dtype, Activation, int64_t width, const void* gate_up, void* y);
  void (*widen)(const bf16* from, float* to, int64_t count);

  // The products for float32 and for bfloat16 activations, and the form in which the latter reads them.
  void (*multiply_strip_f32)(const LinearCall&, const Strip&, int64_t first_row, int64_t end_row);
  void (*multiply_strip_bf16)(const LinearCall&, const Strip&, int64_t first_row, int64_t end_row);
  Activations activations;
  // Computes activation(first) × second for the same strip of two matrices, and writes the result to y in the form of
  // `pack_activations`. Null if the instruction set has no such function.
  void (*multiply_gated)(const LinearCall&, const Strip& gate, const Strip& up, Activation, int64_t first_row,
                         int64_t end_row);
  void (*pack_activations)(const LinearCall&, const bf16* x, int64_t first_row, int64_t num_rows, bf16* to);

  // Products in whole numbers. Activations become bytes for fewer than `word_rows` rows, else words; where
  // `wide_bytes`, few rows become words too if weights have 8 bits. Functions round one row of activations, multiply
  // neighbouring panels, or multiply panels of gates and of ups and leave activation(gate) × up where y has the outputs
  // of the gates.
  void (*round_row)(const IntegerCall&, Dtype, const void* x, int64_t width, int64_t row);
  void (*multiply_panels)(const IntegerCall&, const Panel*, int64_t num_panels, int64_t first_row, int64_t end_row);
  void (*multiply_gated_panels)(const IntegerCall&, const Panel* gates, const Panel* ups, int64_t num_panels,
                                Activation, int64_t first_row, int64_t end_row);
  int64_t word_rows;
  bool wide_bytes;
  bool fast_integers;

  void (*read_row)(const Part&, int64_t row, int64_t num_inputs, Dtype dtype, void* y);

  void (*store_token)(const AttendCall&, int64_t token);
  void (*attend_tiles)(const AttendCall&, const QueryTile*, int64_t num_tiles);
  void (*merge_tile)(const AttendCall&, const QueryTile&, const RowState* partials, int64_t count);

  // The largest value, or NaN if a value is NaN.
  float (*find_maximum)(const float* values, int64_t count);
  // Largest logit of each kSampleBlock neighbours; false when there is a NaN.
  bool (*scan_logits)(const float* logits, int64_t vocabulary, float* block_maxima);
  // exp((logit - top) * inverse_temperature), 0 where that is below `lowest`, and the sum of each kSampleBlock.
  void (*weigh_logits)(const float* logits, int64_t vocabulary, float top, float inverse_temperature, float lowest,
                       float* weights, float* block_sums);
};

const Kernels& kernels();
Isa current_isa();

// Null where this build has no such set.
const Kernels* generic_kernels();
const Kernels* neon_dot_kernels();
const Kernels* avx2_kernels();
const Kernels* avx2_vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

}  // namespace penstock
