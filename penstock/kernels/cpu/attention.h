// Paged attention: the arguments of a call, and the layout of the cache.
//
// The cache of a layer is a run of units of 16 tokens (a block of the engine is one or more units), each holding,
// per KV head,
//   keys    float32 [d][16 tokens]         bfloat16 [d / 2][16 tokens][2]   d padded to 32
//   values  float32 [16 tokens][d]         bfloat16 [8 token pairs][d][2]   d padded to 16
// so that both are second operands of a matrix product as they stand. In eight bits (`rounded`) they are
//   keys    int8 [d][16 tokens]
//   values  int8 [16 tokens][d]
//   scales  float32 [16 tokens] of keys, then of values: a key or value is its codes × its scale
// and are written out in the type of the computation, a split at a time, before they are used.
//
// The last tokens of a request, if they are at most 8, may lie in the second half of a unit, while the first half
// belongs to another request. The slot of the last token shows which half is used.
//
// Keys are taken in splits of 512 counted from position 0. Inside a split the softmax has one maximum per row;
// splits are merged in order. Splits do not depend on other requests of the batch, on the chunks of a prefill, or on
// the number of threads. The results therefore do not depend on these either, to the last bit.
#pragma once

#include "common.h"

namespace penstock {

constexpr int kUnitTokens = 16;
constexpr int kHalfTokens = kUnitTokens / 2;
constexpr int kSplitUnits = 32;
constexpr int kSplitTokens = kSplitUnits * kUnitTokens;
constexpr int kTileRows = 16;
constexpr int kTilesAtOnce = 8;  // that go through the splits of a context together
constexpr int kMaxHeadDim = 256;

// Mirrored field by field in native.py.
struct AttentionLayer {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t window;        // tokens that a token sees, including the token
  const float* rope;     // [positions][head_dim]: cosines, then sines
  const float* q_norm;   // null when absent
  const float* k_norm;
  const float* sinks;    // [num_heads]: logits that take weight and have no value; null when absent
  float scale;
  float softcap;         // 0 when absent
  float norm_eps;
};

struct AttentionBatch {
  int64_t num_tokens;
  int64_t num_requests;
  int64_t max_context_len;
  int64_t table_stride;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t halves_blocks;  // whether the last tokens of a request may begin in the middle of a block
};

struct CacheLayout {
  int64_t units_per_block;
  int64_t key_dim;      // padded
  int64_t value_dim;    // padded
  int64_t value_bytes;  // of one element
  int64_t num_kv_heads;
  bool rounded;  // to int8, with scales

  int64_t keys_bytes() const { return key_dim * kUnitTokens * value_bytes; }
  int64_t values_bytes() const { return value_dim * kUnitTokens * value_bytes; }
  int64_t scales_bytes() const { return rounded ? 2 * kUnitTokens * static_cast<int64_t>(sizeof(float)) : 0; }
  int64_t head_bytes() const { return keys_bytes() + values_bytes() + scales_bytes(); }
  int64_t unit_bytes() const { return head_bytes() * num_kv_heads; }
};

CacheLayout cache_layout(Dtype dtype, bool rounded, int64_t block_size, int64_t num_kv_heads, int64_t head_dim);

struct AttendCall {
  const AttentionLayer* layer;
  const AttentionBatch* batch;
  CacheLayout layout;
  Dtype dtype;
  uint8_t* cache;
  const void* qkv;
  void* queries;  // [kv head][token][query head of it][key_dim], after norm and rope
  void* out;

  int64_t heads_per_kv_head() const { return layer->num_heads / layer->num_kv_heads; }
  uint8_t* keys(int64_t unit, int64_t kv_head) const {
    return cache + unit * layout.unit_bytes() + kv_head * layout.head_bytes();
  }
  uint8_t* values(int64_t unit, int64_t kv_head) const {
    return keys(unit, kv_head) + layout.keys_bytes();
  }
  float* scales(int64_t unit, int64_t kv_head) const {
    return reinterpret_cast<float*>(values(unit, kv_head) + layout.values_bytes());
  }
  // The physical unit that holds a request's tokens 16 * index, 16 * index + 1, ...
  int64_t unit_of(int64_t request, int64_t index) const {
    const int32_t* table = batch->block_tables + request * batch->table_stride;
    if (layout.units_per_block == 1) return table[index];
    return table[index / layout.units_per_block] * layout.units_per_block + index % layout.units_per_block;
  }
  // Returns where the tokens of a request begin in a last unit that is not full: at 0, or in the middle.
  int64_t tail_offset(int64_t request) const {
    if (!batch->halves_blocks) return 0;
    const int64_t slot = batch->slots[batch->query_starts[request + 1] - 1];
    return (slot - (batch->context_lens[request] - 1)) & kHalfTokens;  // the difference is a multiple of 8
  }
};

struct LayerCache {
  int rounded;
  int64_t block_size;
  void* data;
};

// Says whether the pieces of a step for one layer also fit the other layer.
inline bool cut_alike(const AttentionLayer& a, const AttentionLayer& b) {
  return a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim &&
         a.window == b.window;
}

// With `is_cut`, the thread's last call was for the same step, over a layer that is cut alike.
void attend(const AttentionLayer& layer, const AttentionBatch& batch, Dtype dtype, const LayerCache& cache,
            const void* qkv, void* out, bool is_cut = false);

// The softmax-weighted sum of some rows over some keys, not yet divided by the sum of weights.
struct RowState {
  float maximum[kTileRows];
  float weight_sum[kTileRows];
  float* output;  // [kTileRows][value_dim]
};

// Up to 16 of a request's rows for one KV head. Row r is query head r % heads_per_kv_head of the request's token
// r / heads_per_kv_head of this step; where all rows see all keys, the rows of the next requests follow, whose tokens
// do so too.
struct QueryTile {
  int64_t request;
  int64_t kv_head;
  int64_t first_row;
  int64_t num_rows;
  int64_t first_split;
  int64_t end_split;
  RowState* partial;  // null: write the answer; else leave the state here
  bool sees_all;      // of the splits
};

}  // namespace penstock
