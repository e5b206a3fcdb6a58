// The functions that exist once per instruction set, and the table that picks one set at run time.
#pragma once

#include "attention.h"
#include "common.h"
#include "linear.h"

namespace penstock {

constexpr int kSampleBlock = 64;

enum class Isa : int32_t { generic = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };

struct ElementwiseArgs {
  Dtype dtype;
  int64_t width;
  float eps;
  Dtype weight_dtype;
  const void* weight;
};

struct Kernels {
  // One row each.
  void (*rms_norm)(const ElementwiseArgs&, const void* x, void* y);
  void (*add_rms_norm)(const ElementwiseArgs&, const void* x, void* residual, void* y);
  void (*gated)(Dtype, Activation, int64_t width, const void* gate_up, void* y);
  void (*widen)(const bf16* from, float* to, int64_t count);

  // The product for float32 activations, and the one for bfloat16: where `bf16_activations` is set it reads them
  // padded to whole tiles, else widened to float32.
  void (*multiply_strip_f32)(const LinearCall&, const Strip&, int64_t first_row, int64_t end_row);
  void (*multiply_strip_bf16)(const LinearCall&, const Strip&, int64_t first_row, int64_t end_row);
  bool bf16_activations;
  void (*read_row)(const Part&, int64_t row, int64_t num_inputs, Dtype dtype, void* y);

  void (*store_token)(const AttendCall&, int64_t token);
  void (*attend_tile)(const AttendCall&, const QueryTile&);
  void (*merge_tile)(const AttendCall&, const QueryTile&, const RowState* partials, int64_t count);

  // Largest logit of each kSampleBlock neighbours; false when there is a NaN.
  bool (*scan_logits)(const float* logits, int64_t vocabulary, float* block_maxima);
  // exp((logit - top) * inverse_temperature), 0 where that is below `lowest`.
  void (*weigh_logits)(const float* logits, int64_t vocabulary, float top, float inverse_temperature, float lowest,
                       float* weights);
};

const Kernels& kernels();
Isa current_isa();

// Null where this build has no such set.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

}  // namespace penstock
