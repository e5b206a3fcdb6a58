// Sharing attention between threads: first every token's queries, keys and values, then tiles of query rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_pieces.h"
#include "kernels.h"
#include "pool.h"

namespace penstock {
namespace {

// Below this many elements of Q, K and V waking other threads costs more than it saves.
constexpr int64_t kSerialElements = 8192;
// Neighbouring tokens of a prompt share the lines of memory that their keys go to.
constexpr int64_t kTokensPerItem = kUnitTokens;
constexpr int64_t kFewTokensPerItem = 4;
constexpr int64_t kSerialMerges = 12;

void store_tokens(const AttendCall& call) {
  const int64_t tokens = call.batch->num_tokens;
  const int64_t heads = call.layer->num_heads + 2 * call.layer->num_kv_heads;
  const auto store = kernels().store_token;
  if (tokens * heads * call.layer->head_dim <= kSerialElements) {
    for (int64_t token = 0; token < tokens; ++token) store(call, token);
    return;
  }
  const int64_t per_item = call.batch->num_requests == tokens ? kFewTokensPerItem : kTokensPerItem;
  parallel_for(ceil_div(tokens, per_item), [&](int64_t item) {
    const int64_t end = std::min(tokens, (item + 1) * per_item);
    for (int64_t token = item * per_item; token < end; ++token) store(call, token);
  }, num_threads());
}

void merge_pieces(const AttendCall& call, const AttentionPieces& work) {
  const auto merge_one = [&](int64_t i) {
    static thread_local std::vector<RowState> states;
    const Merge& merge = work.merges[i];
    states.resize(merge.num_parts);
    collect_states(call, work, merge, states.data());
    kernels().merge_tile(call, merge.tile, states.data(), static_cast<int64_t>(merge.num_parts));
  };
  const int64_t count = static_cast<int64_t>(work.merges.size());
  if (count > kSerialMerges) return parallel_for(count, merge_one);
  for (int64_t i = 0; i < count; ++i) merge_one(i);
}

// One head's part of half a unit. Only whole halves: pairs of tokens lie together.
void copy_half(const CacheLayout& layout, const uint8_t* from, int64_t from_offset, uint8_t* to, int64_t to_offset) {
  const auto copy_tokens = [&](int64_t at, int64_t token_bytes) {
    memcpy(to + at + to_offset * token_bytes, from + at + from_offset * token_bytes, kHalfTokens * token_bytes);
  };
  const int64_t key_token_bytes = layout.rounded ? 1 : 4;  // in each row
  for (int64_t at = 0; at < layout.keys_bytes(); at += kUnitTokens * key_token_bytes) copy_tokens(at, key_token_bytes);
  copy_tokens(layout.keys_bytes(), layout.value_dim * layout.value_bytes);
  const int64_t scales_at = layout.keys_bytes() + layout.values_bytes();
  constexpr int64_t row_of_scales = kUnitTokens * sizeof(float);
  for (int64_t at = 0; at < layout.scales_bytes(); at += row_of_scales) copy_tokens(scales_at + at, sizeof(float));
}

}  // namespace

CacheLayout cache_layout(Dtype dtype, bool rounded, int64_t block_size, int64_t num_kv_heads, int64_t head_dim) {
  const int64_t element_bytes = rounded ? 1 : dtype == Dtype::float32 ? 4 : 2;
  return {block_size / kUnitTokens, round_up(head_dim, 32), round_up(head_dim, 16), element_bytes, num_kv_heads,
          rounded};
}

void attend(const AttentionLayer& layer, const AttentionBatch& batch, Dtype dtype, const LayerCache& cache,
            const void* qkv, void* out, bool is_cut) {
  static thread_local Scratch queries;
  static thread_local AttentionPieces work;
  kernels().enter();
  AttendCall call = {};
  call.layer = &layer;
  call.batch = &batch;
  call.dtype = dtype;
  call.layout = cache_layout(dtype, cache.rounded != 0, cache.block_size, layer.num_kv_heads, layer.head_dim);
  call.cache = static_cast<uint8_t*>(cache.data);
  call.qkv = qkv;
  call.out = out;
  call.queries = queries.get<float>(batch.num_tokens * layer.num_heads * call.layout.key_dim);

  store_tokens(call);
  if (!is_cut) cut_attention(call, num_threads(), &work);
  const AttentionPieces& shared_work = work;  // a thread_local would be the worker's own inside the region
  parallel_for(static_cast<int64_t>(work.items.size()) - 1, [&](int64_t item) {
    const int64_t first = shared_work.items[item], end = shared_work.items[item + 1];
    kernels().attend_tiles(call, shared_work.pieces.data() + first, end - first);
  });
  merge_pieces(call, work);
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API int64_t penstock_cache_block_bytes(int dtype, int rounded, int64_t block_size, int64_t num_kv_heads,
                                                int64_t head_dim) {
  const CacheLayout layout =
      cache_layout(static_cast<Dtype>(dtype), rounded != 0, block_size, num_kv_heads, head_dim);
  return layout.unit_bytes() * layout.units_per_block;
}

// The half of a unit that begins at slot `from` to the half that begins at slot `to`, in every layer. Layer i's cache
// begins `layer_bytes` after the cache of layer i - 1.
PENSTOCK_API void penstock_copy_half(int dtype, int rounded, int64_t num_kv_heads, int64_t head_dim, void* caches,
                                     int64_t num_layers, int64_t layer_bytes, int64_t from, int64_t to) {
  const CacheLayout layout =
      cache_layout(static_cast<Dtype>(dtype), rounded != 0, kUnitTokens, num_kv_heads, head_dim);
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    uint8_t* cache = static_cast<uint8_t*>(caches) + layer * layer_bytes;
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      const int64_t at = head * layout.head_bytes();
      copy_half(layout, cache + from / kUnitTokens * layout.unit_bytes() + at, from % kUnitTokens,
                cache + to / kUnitTokens * layout.unit_bytes() + at, to % kUnitTokens);
    }
  }
}

PENSTOCK_API void* penstock_allocate_pages(int64_t bytes) { return allocate_pages(static_cast<size_t>(bytes)); }

PENSTOCK_API void penstock_touch_pages(void* data, int64_t bytes) { touch_pages(data, static_cast<size_t>(bytes)); }

PENSTOCK_API void penstock_free_pages(void* data, int64_t bytes) { free_pages(data, static_cast<size_t>(bytes)); }

PENSTOCK_API void penstock_attend(const AttentionLayer* layer, const AttentionBatch* batch, int dtype, int rounded,
                                  int64_t block_size, void* cache, const void* qkv, void* out) {
  attend(*layer, *batch, static_cast<Dtype>(dtype), {rounded, block_size, cache}, qkv, out);
}
