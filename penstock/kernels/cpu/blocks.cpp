// Chains of operations whose intermediate results nobody else sees: one call from Python instead of three, and
// buffers that are used again for every layer instead of fresh memory.
#include "attention.h"
#include "common.h"
#include "linear.h"

using namespace penstock;

PENSTOCK_API void penstock_linear(const Linear*, int dtype, int64_t rows, const void* x, int y_dtype, void* y);
PENSTOCK_API void penstock_gated(int dtype, int activation, int64_t rows, int64_t width, const void* gate_up, void* y);
PENSTOCK_API void penstock_attend(const AttentionLayer*, const AttentionBatch*, int dtype, int64_t block_size,
                                  void* cache, const void* qkv, void* out);

namespace {

// Room for the widest element type.
void* rows_of(Scratch& scratch, int64_t rows, int64_t width) { return scratch.get<float>(rows * width); }

}  // namespace

PENSTOCK_API void penstock_mlp(const Linear* gate_up, const Linear* down, int dtype, int activation, int64_t rows,
                               const void* x, void* y) {
  static thread_local Scratch wide_rows, narrow_rows;
  void* wide = rows_of(wide_rows, rows, gate_up->out_features);
  void* narrow = rows_of(narrow_rows, rows, down->in_features);
  penstock_linear(gate_up, dtype, rows, x, dtype, wide);
  penstock_gated(dtype, activation, rows, down->in_features, wide, narrow);
  penstock_linear(down, dtype, rows, narrow, dtype, y);
}

PENSTOCK_API void penstock_attention(const Linear* qkv, const Linear* output, const AttentionLayer* layer,
                                     const AttentionBatch* batch, int dtype, int64_t block_size, void* cache,
                                     const void* x, void* y) {
  static thread_local Scratch projected_rows, attended_rows;
  const int64_t rows = batch->num_tokens;
  void* projected = rows_of(projected_rows, rows, qkv->out_features);
  void* attended = rows_of(attended_rows, rows, output->in_features);
  penstock_linear(qkv, dtype, rows, x, dtype, projected);
  penstock_attend(layer, batch, dtype, block_size, cache, projected, attended);
  penstock_linear(output, dtype, rows, attended, dtype, y);
}
