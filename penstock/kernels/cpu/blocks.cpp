// Chains of operations whose intermediate results nobody else sees: one call from Python instead of several, and
// buffers that are used again for every layer instead of fresh memory.
#include "attention.h"
#include "product.h"

using namespace penstock;

PENSTOCK_API void penstock_attend(const AttentionLayer*, const AttentionBatch*, int dtype, int rounded, int64_t block_size,
                                  void* cache, const void* qkv, void* out);

namespace {

// Room for the widest element type.
void* rows_of(Scratch& scratch, int64_t rows, int64_t width) { return scratch.get<float>(rows * width); }

void run_mlp(const Linear& gate_up, const Linear& down, Dtype dtype, Activation activation, int64_t rows,
             const InputRows& in, const OutputRows& out) {
  static thread_local Scratch wide_rows, packed_rows;
  if (gates_integers(gate_up)) {
    bf16* gated = packed_rows.get<bf16>(rows * down.in_features);
    multiply_gated_integers(gate_up, rows, in, activation, gated);
    return multiply(down, dtype, rows, InputRows::given(gated), out);
  }
  if (gates_on_the_way(gate_up, dtype, rows)) {
    bf16* packed = packed_rows.get<bf16>(rows * down.in_features);
    multiply_gated(gate_up, rows, in, activation, packed);
    return multiply(down, dtype, rows, InputRows::packed(packed), out);
  }
  void* wide = rows_of(wide_rows, rows, gate_up.out_features);
  multiply(gate_up, dtype, rows, in, {wide, dtype});
  multiply(down, dtype, rows, InputRows::gated(wide, activation), out);
}

// A layer's cache, as the engine hands it over.
struct Cache {
  int rounded;
  int64_t block_size;
  void* data;
};

void run_attention(const Linear& qkv, const Linear& output, const AttentionLayer* layer, const AttentionBatch* batch,
                   const Cache& cache, Dtype dtype, const InputRows& in, const OutputRows& out) {
  static thread_local Scratch projected_rows, attended_rows;
  const int64_t rows = batch->num_tokens;
  void* projected = rows_of(projected_rows, rows, qkv.out_features);
  void* attended = rows_of(attended_rows, rows, output.in_features);
  multiply(qkv, dtype, rows, in, {projected, dtype});
  penstock_attend(layer, batch, static_cast<int>(dtype), cache.rounded, cache.block_size, cache.data, projected,
                  attended);
  multiply(output, dtype, rows, InputRows::given(attended), out);
}

}  // namespace

PENSTOCK_API void penstock_mlp(const Linear* gate_up, const Linear* down, int dtype, int activation, int64_t rows,
                               const void* x, void* y) {
  const Dtype type = static_cast<Dtype>(dtype);
  run_mlp(*gate_up, *down, type, static_cast<Activation>(activation), rows, InputRows::given(x), {y, type});
}

PENSTOCK_API void penstock_attention(const Linear* qkv, const Linear* output, const AttentionLayer* layer,
                                     const AttentionBatch* batch, int dtype, int rounded, int64_t block_size,
                                     void* cache, const void* x, void* y) {
  const Dtype type = static_cast<Dtype>(dtype);
  run_attention(*qkv, *output, layer, batch, {rounded, block_size, cache}, type, InputRows::given(x), {y, type});
}

// residual += mlp(rms_norm(residual))
PENSTOCK_API void penstock_mlp_block(const Linear* gate_up, const Linear* down, int dtype, int activation,
                                     int norm_dtype, const void* norm, float eps, int64_t rows, void* residual) {
  const Dtype type = static_cast<Dtype>(dtype);
  const ElementwiseArgs norm_args = {type, gate_up->in_features, eps, static_cast<Dtype>(norm_dtype), norm};
  run_mlp(*gate_up, *down, type, static_cast<Activation>(activation), rows, InputRows::normed(residual, norm_args),
          {residual, type, true});
}

// residual += attention(rms_norm(residual))
PENSTOCK_API void penstock_attention_block(const Linear* qkv, const Linear* output, const AttentionLayer* layer,
                                           const AttentionBatch* batch, int dtype, int rounded, int64_t block_size,
                                           void* cache, int norm_dtype, const void* norm, float eps, void* residual) {
  const Dtype type = static_cast<Dtype>(dtype);
  const ElementwiseArgs norm_args = {type, qkv->in_features, eps, static_cast<Dtype>(norm_dtype), norm};
  run_attention(*qkv, *output, layer, batch, {rounded, block_size, cache}, type, InputRows::normed(residual, norm_args),
                {residual, type, true});
}
