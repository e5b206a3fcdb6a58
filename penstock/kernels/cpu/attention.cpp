// Sharing attention between threads: first every token's queries, keys and values, then tiles of query rows.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace penstock {
namespace {

// Below this many elements of Q, K and V waking other threads costs more than it saves.
constexpr int64_t kSerialElements = 8192;
constexpr int64_t kTokensPerItem = 4;
constexpr int64_t kTilesPerThread = 3;

void store_tokens(const AttendCall& call) {
  const int64_t tokens = call.batch->num_tokens;
  const int64_t heads = call.layer->num_heads + 2 * call.layer->num_kv_heads;
  const auto store = kernels().store_token;
  if (tokens * heads * call.layer->head_dim <= kSerialElements) {
    for (int64_t token = 0; token < tokens; ++token) store(call, token);
    return;
  }
  parallel_for(ceil_div(tokens, kTokensPerItem), [&](int64_t item) {
    const int64_t end = std::min(tokens, (item + 1) * kTokensPerItem);
    for (int64_t token = item * kTokensPerItem; token < end; ++token) store(call, token);
  });
}

QueryTile make_tile(const AttendCall& call, int64_t request, int64_t kv_head, int64_t first_row, int64_t num_rows) {
  const int32_t* starts = call.batch->query_starts + request;
  const int64_t first_position = call.batch->context_lens[request] - (starts[1] - starts[0]);
  const int64_t heads = call.heads_per_kv_head();
  const int64_t first_end = first_position + first_row / heads + 1;
  const int64_t last_end = first_position + (first_row + num_rows - 1) / heads + 1;
  const int64_t first_key = std::max<int64_t>(0, first_end - call.layer->window);
  return {request, kv_head, first_row, num_rows, first_key / kSplitTokens, ceil_div(last_end, kSplitTokens), nullptr};
}

// Longest first, so that no thread is left with a long one at the end.
void list_tiles(const AttendCall& call, std::vector<QueryTile>& tiles) {
  tiles.clear();
  for (int64_t request = 0; request < call.batch->num_requests; ++request) {
    const int32_t* starts = call.batch->query_starts + request;
    const int64_t rows = (starts[1] - starts[0]) * call.heads_per_kv_head();
    for (int64_t first = rows == 0 ? -1 : (rows - 1) / kTileRows * kTileRows; first >= 0; first -= kTileRows) {
      for (int64_t kv_head = 0; kv_head < call.layer->num_kv_heads; ++kv_head) {
        tiles.push_back(make_tile(call, request, kv_head, first, std::min<int64_t>(kTileRows, rows - first)));
      }
    }
  }
}

// Few tiles over long contexts: threads share a tile's splits, and the states are merged in the same order as one
// thread would have done it.
void attend_by_splits(const AttendCall& call, const std::vector<QueryTile>& tiles) {
  static thread_local Scratch outputs;
  static thread_local std::vector<RowState> states;
  static thread_local std::vector<QueryTile> pieces;
  const int64_t output_size = kTileRows * call.layout.value_dim;
  size_t total = 0;
  for (const QueryTile& tile : tiles) total += static_cast<size_t>(tile.end_split - tile.first_split);
  states.resize(total);
  pieces.clear();
  float* output = outputs.get<float>(static_cast<int64_t>(total) * output_size);
  for (const QueryTile& tile : tiles) {
    for (int64_t split = tile.first_split; split < tile.end_split; ++split) {
      RowState& state = states[pieces.size()];
      state.output = output + static_cast<int64_t>(pieces.size()) * output_size;
      QueryTile piece = tile;
      piece.first_split = split;
      piece.end_split = split + 1;
      piece.partial = &state;
      pieces.push_back(piece);
    }
  }
  const std::vector<QueryTile>& shared_pieces = pieces;
  parallel_for(static_cast<int64_t>(total), [&](int64_t i) { kernels().attend_tile(call, shared_pieces[i]); });
  const RowState* next = states.data();
  for (const QueryTile& tile : tiles) {
    const int64_t count = tile.end_split - tile.first_split;
    kernels().merge_tile(call, tile, next, count);
    next += count;
  }
}

}  // namespace

CacheLayout cache_layout(Dtype dtype, int64_t block_size, int64_t num_kv_heads, int64_t head_dim) {
  return {block_size / kUnitTokens, round_up(head_dim, 32), round_up(head_dim, 16),
          dtype == Dtype::float32 ? 4 : 2, num_kv_heads};
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API int64_t penstock_cache_block_bytes(int dtype, int64_t block_size, int64_t num_kv_heads,
                                                int64_t head_dim) {
  const CacheLayout layout = cache_layout(static_cast<Dtype>(dtype), block_size, num_kv_heads, head_dim);
  return layout.unit_bytes() * layout.units_per_block;
}

PENSTOCK_API void* penstock_allocate_pages(int64_t bytes) { return allocate_pages(static_cast<size_t>(bytes)); }

PENSTOCK_API void penstock_free_pages(void* data, int64_t bytes) { free_pages(data, static_cast<size_t>(bytes)); }

PENSTOCK_API void penstock_attend(const AttentionLayer* layer, const AttentionBatch* batch, int dtype,
                                  int64_t block_size, void* cache, const void* qkv, void* out) {
  static thread_local Scratch queries;
  static thread_local std::vector<QueryTile> tiles;
  kernels().enter();
  AttendCall call = {};
  call.layer = layer;
  call.batch = batch;
  call.dtype = static_cast<Dtype>(dtype);
  call.layout = cache_layout(call.dtype, block_size, layer->num_kv_heads, layer->head_dim);
  call.cache = static_cast<uint8_t*>(cache);
  call.qkv = qkv;
  call.out = out;
  call.queries = queries.get<float>(batch->num_tokens * layer->num_heads * call.layout.key_dim);

  store_tokens(call);
  list_tiles(call, tiles);
  const bool few = static_cast<int64_t>(tiles.size()) < num_threads() * kTilesPerThread;
  if (few && batch->max_context_len > kSplitTokens && num_threads() > 1) return attend_by_splits(call, tiles);
  const std::vector<QueryTile>& shared_tiles = tiles;
  parallel_for(static_cast<int64_t>(tiles.size()),
               [&](int64_t i) { kernels().attend_tile(call, shared_tiles[i]); });
}
