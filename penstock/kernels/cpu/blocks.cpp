// Chains of operations whose intermediate results stay inside the library: one call from Python instead of several, and
// buffers that are used again for every layer instead of fresh memory.
#include "attention.h"
#include "product.h"

using namespace penstock;

namespace {

// Room for the widest element type.
void* rows_of(Scratch& scratch, int64_t rows, int64_t width) { return scratch.get<float>(rows * width); }

void run_mlp(const Linear& gate_up, const Linear& down, Dtype dtype, Activation activation, int64_t rows,
             const InputRows& in, const OutputRows& out) {
  static thread_local Scratch wide_rows, packed_rows;
  if (gates_integers(gate_up)) {
    void* gated = rows_of(packed_rows, rows, down.in_features);
    multiply_gated_integers(gate_up, dtype, rows, in, activation, gated);
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

void run_attention(const Linear& qkv, const Linear& output, const AttentionLayer& layer, const AttentionBatch& batch,
                   const LayerCache& cache, Dtype dtype, const InputRows& in, const OutputRows& out,
                   bool is_cut = false) {
  static thread_local Scratch projected_rows, attended_rows;
  const int64_t rows = batch.num_tokens;
  void* projected = rows_of(projected_rows, rows, qkv.out_features);
  void* attended = rows_of(attended_rows, rows, output.in_features);
  multiply(qkv, dtype, rows, in, {projected, dtype});
  attend(layer, batch, dtype, cache, projected, attended, is_cut);
  multiply(output, dtype, rows, InputRows::given(attended), out);
}

// The norm before each half of a layer.
struct Norm {
  const void* weight;
  int32_t dtype;
};

void run_mlp_block(const Linear& gate_up, const Linear& down, Dtype dtype, Activation activation, const Norm& norm,
                   float eps, int64_t rows, void* residual) {
  const ElementwiseArgs args = {dtype, gate_up.in_features, eps, static_cast<Dtype>(norm.dtype), norm.weight};
  run_mlp(gate_up, down, dtype, activation, rows, InputRows::normed(residual, args), {residual, dtype, true});
}

void run_attention_block(const Linear& qkv, const Linear& output, const AttentionLayer& layer,
                         const AttentionBatch& batch, const LayerCache& cache, Dtype dtype, const Norm& norm, float eps,
                         void* residual, bool is_cut = false) {
  const ElementwiseArgs args = {dtype, qkv.in_features, eps, static_cast<Dtype>(norm.dtype), norm.weight};
  run_attention(qkv, output, layer, batch, cache, dtype, InputRows::normed(residual, args), {residual, dtype, true},
                is_cut);
}

// Mirrored field by field in library.py.
struct DecoderLayer {
  const Linear* qkv;
  const Linear* output;
  const Linear* gate_up;
  const Linear* down;
  const AttentionLayer* attention;
  Norm attention_norm;
  Norm mlp_norm;
};

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
  run_attention(*qkv, *output, *layer, *batch, {rounded, block_size, cache}, type, InputRows::given(x), {y, type});
}

// residual += mlp(rms_norm(residual))
PENSTOCK_API void penstock_mlp_block(const Linear* gate_up, const Linear* down, int dtype, int activation,
                                     int norm_dtype, const void* norm, float eps, int64_t rows, void* residual) {
  run_mlp_block(*gate_up, *down, static_cast<Dtype>(dtype), static_cast<Activation>(activation), {norm, norm_dtype},
                eps, rows, residual);
}

// residual += attention(rms_norm(residual))
PENSTOCK_API void penstock_attention_block(const Linear* qkv, const Linear* output, const AttentionLayer* layer,
                                           const AttentionBatch* batch, int dtype, int rounded, int64_t block_size,
                                           void* cache, int norm_dtype, const void* norm, float eps, void* residual) {
  run_attention_block(*qkv, *output, *layer, *batch, {rounded, block_size, cache}, static_cast<Dtype>(dtype),
                      {norm, norm_dtype}, eps, residual);
}

// Both blocks of every layer, one layer after the other. Layer i's cache begins `layer_bytes` after the cache of layer
// i - 1.
PENSTOCK_API void penstock_decoder_layers(const DecoderLayer* layers, int64_t num_layers, const AttentionBatch* batch,
                                          int dtype, int activation, float eps, int rounded, int64_t block_size,
                                          void* caches, int64_t layer_bytes, void* residual) {
  const Dtype type = static_cast<Dtype>(dtype);
  for (int64_t i = 0; i < num_layers; ++i) {
    const DecoderLayer& layer = layers[i];
    const LayerCache cache = {rounded, block_size, static_cast<uint8_t*>(caches) + i * layer_bytes};
    const bool is_cut = i > 0 && cut_alike(*layer.attention, *layers[i - 1].attention);
    run_attention_block(*layer.qkv, *layer.output, *layer.attention, *batch, cache, type, layer.attention_norm, eps,
                        residual, is_cut);
    run_mlp_block(*layer.gate_up, *layer.down, type, static_cast<Activation>(activation), layer.mlp_norm, eps,
                  batch->num_tokens, residual);
  }
}
