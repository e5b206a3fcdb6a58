#include "attention_pieces.h"

#include <algorithm>

namespace penstock {
namespace {

constexpr int64_t kTilesPerThread = 3;
constexpr int64_t kItemsPerThread = 8;

// Neighbouring requests that see the first splits through the same blocks.
struct SharedRun {
  int64_t first_request;
  int64_t num_requests;
  int64_t num_splits;
  int64_t first_piece;
};

int64_t num_queries(const AttendCall& call, int64_t request) {
  return call.batch->query_starts[request + 1] - call.batch->query_starts[request];
}

// Returns how many whole splits a request and the next request have in common at their beginning.
int64_t splits_in_common(const AttendCall& call, int64_t request) {
  const AttentionBatch& batch = *call.batch;
  if (num_queries(call, request) != 1 || num_queries(call, request + 1) != 1) return 0;
  const int64_t context_len = std::min(batch.context_lens[request], batch.context_lens[request + 1]);
  const int64_t blocks_per_split = kSplitUnits / call.layout.units_per_block;
  const int32_t* table = batch.block_tables + request * batch.table_stride;
  const int32_t* end = table + context_len / kSplitTokens * blocks_per_split;
  return (std::mismatch(table, end, table + batch.table_stride).first - table) / blocks_per_split;
}

// Returns the rows of a run. The rows of all requests follow each other, and are cut into tiles of full size.
int64_t rows_of(const AttendCall& call, const SharedRun& run) { return run.num_requests * call.heads_per_kv_head(); }

void find_runs(const AttendCall& call, std::vector<SharedRun>& runs) {
  runs.clear();
  const int64_t longest = call.batch->max_context_len;
  const bool worth_it = 2 * call.heads_per_kv_head() <= kTileRows && longest >= kSplitTokens;
  const bool possible = call.layer->window >= longest && kSplitUnits % call.layout.units_per_block == 0;
  if (!worth_it || !possible) return;
  for (int64_t request = 0; request + 1 < call.batch->num_requests; ++request) {
    const int64_t common = splits_in_common(call, request);
    if (common == 0) continue;
    const bool goes_on = !runs.empty() && runs.back().first_request + runs.back().num_requests == request + 1 &&
                         runs.back().num_splits == common;
    if (goes_on) {
      runs.back().num_requests += 1;
    } else if (runs.empty() || runs.back().first_request + runs.back().num_requests <= request) {
      runs.push_back({request, 2, common, 0});
    }
  }
}

int64_t add_piece(AttentionPieces& into, QueryTile piece, int64_t first_split, int64_t end_split,
                  bool begins_item = true) {
  const int64_t index = static_cast<int64_t>(into.pieces.size());
  piece.first_split = first_split;
  piece.end_split = end_split;
  into.pieces.push_back(piece);
  if (begins_item) into.items.push_back(index);
  return index;
}

// One piece for each (KV head, split, tile of rows), in this order. Tiles of a split read the same keys, and share an
// item if there are items enough for all threads.
void add_shared_pieces(const AttendCall& call, int64_t num_threads, SharedRun& run, AttentionPieces& into) {
  run.first_piece = static_cast<int64_t>(into.pieces.size());
  const int64_t heads = call.heads_per_kv_head(), num_rows = rows_of(call, run);
  const int64_t num_tiles = ceil_div(num_rows, kTileRows);
  const int64_t num_pieces = call.layer->num_kv_heads * run.num_splits * num_tiles;
  const int64_t per_item = std::clamp<int64_t>(num_pieces / (num_threads * kTilesPerThread), 1, num_tiles);
  for (int64_t kv_head = 0; kv_head < call.layer->num_kv_heads; ++kv_head) {
    for (int64_t split = 0; split < run.num_splits; ++split) {
      for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t first = i * kTileRows, rows = std::min<int64_t>(kTileRows, num_rows - first);
        const QueryTile tile = {run.first_request + first / heads, kv_head, first % heads, rows, 0, 0, nullptr, true};
        add_piece(into, tile, split, split + 1, i % per_item == 0);
      }
    }
  }
}

// Adds the merges of a request: one merge, or two merges if a tile of the run ends between the rows of the request.
// `own` are the pieces over blocks that the request does not share.
void add_shared_merges(const AttendCall& call, const SharedRun& run, const QueryTile& tile, int64_t first_own,
                       int64_t end_own, AttentionPieces& into) {
  const int64_t heads = call.heads_per_kv_head(), num_tiles = ceil_div(rows_of(call, run), kTileRows);
  const int64_t first = (tile.request - run.first_request) * heads, end = first + tile.num_rows;
  for (int64_t row = first; row < end;) {
    const int64_t next = std::min(end, (row / kTileRows + 1) * kTileRows);
    QueryTile part = tile;
    part.first_row = row - first;
    part.num_rows = next - row;
    const size_t first_part = into.parts.size();
    for (int64_t split = 0; split < run.num_splits; ++split) {
      const int64_t piece = (tile.kv_head * run.num_splits + split) * num_tiles + row / kTileRows;
      into.parts.push_back({run.first_piece + piece, row % kTileRows});
    }
    for (int64_t piece = first_own; piece < end_own; ++piece) into.parts.push_back({piece, row - first});
    into.merges.push_back({part, first_part, into.parts.size() - first_part});
    row = next;
  }
}

QueryTile make_tile(const AttendCall& call, int64_t request, int64_t kv_head, int64_t first_row, int64_t num_rows) {
  const int64_t first_position = call.batch->context_lens[request] - num_queries(call, request);
  const int64_t heads = call.heads_per_kv_head();
  const int64_t first_end = first_position + first_row / heads + 1;
  const int64_t last_end = first_position + (first_row + num_rows - 1) / heads + 1;
  const int64_t first_key = std::max<int64_t>(0, first_end - call.layer->window);
  return {request,  kv_head, first_row, num_rows, first_key / kSplitTokens, ceil_div(last_end, kSplitTokens),
          nullptr, false};
}

// How many neighbouring tiles of a request and a KV head make an item. They read nearly the same keys.
int64_t tiles_per_item(const AttendCall& call, int64_t num_threads) {
  int64_t tiles = 0;
  for (int64_t request = 0; request < call.batch->num_requests; ++request) {
    tiles += ceil_div(num_queries(call, request) * call.heads_per_kv_head(), kTileRows) * call.layer->num_kv_heads;
  }
  return std::clamp<int64_t>(tiles / (num_threads * kItemsPerThread), 1, kTilesAtOnce);
}

// Lists the tiles of each item one after the other. Items with the longest contexts come first, so that no thread
// begins a long item when the others are done.
void list_tiles(const AttendCall& call, int64_t per_item, std::vector<QueryTile>& tiles) {
  tiles.clear();
  const int64_t item_rows = per_item * kTileRows;
  for (int64_t request = 0; request < call.batch->num_requests; ++request) {
    const int64_t rows = num_queries(call, request) * call.heads_per_kv_head();
    for (int64_t item = ceil_div(rows, item_rows) - 1; item >= 0; --item) {
      const int64_t end = std::min(rows, (item + 1) * item_rows);
      for (int64_t kv_head = 0; kv_head < call.layer->num_kv_heads; ++kv_head) {
        for (int64_t first = item * item_rows; first < end; first += kTileRows) {
          tiles.push_back(make_tile(call, request, kv_head, first, std::min<int64_t>(kTileRows, end - first)));
        }
      }
    }
  }
}

// Gives a state and room for an output to every piece that a merge reads.
void place_states(const AttendCall& call, AttentionPieces& into) {
  const int64_t output_size = kTileRows * call.layout.value_dim;
  into.states.resize(into.pieces.size());
  float* output = into.outputs.get<float>(static_cast<int64_t>(into.pieces.size()) * output_size);
  for (const StateRows& part : into.parts) {
    RowState& state = into.states[part.piece];
    state.output = output + part.piece * output_size;
    into.pieces[part.piece].partial = &state;
  }
}

}  // namespace

void cut_attention(const AttendCall& call, int64_t num_threads, AttentionPieces* into) {
  static thread_local std::vector<QueryTile> tiles;
  static thread_local std::vector<SharedRun> runs;
  into->pieces.clear();
  into->items.clear();
  into->parts.clear();
  into->merges.clear();
  const int64_t per_item = tiles_per_item(call, num_threads), item_rows = per_item * kTileRows;
  list_tiles(call, per_item, tiles);
  find_runs(call, runs);
  for (SharedRun& run : runs) add_shared_pieces(call, num_threads, run, *into);
  const bool few = num_threads > 1 && static_cast<int64_t>(tiles.size()) < num_threads * kTilesPerThread;
  auto run = runs.begin();
  for (const QueryTile& tile : tiles) {
    while (run != runs.end() && run->first_request + run->num_requests <= tile.request) ++run;
    const bool shares = run != runs.end() && run->first_request <= tile.request;
    if (!shares && !(few && tile.end_split - tile.first_split > 1)) {
      add_piece(*into, tile, tile.first_split, tile.end_split, tile.first_row % item_rows == 0);
      continue;
    }
    const int64_t first_own = static_cast<int64_t>(into->pieces.size());
    for (int64_t split = shares ? run->num_splits : tile.first_split; split < tile.end_split; ++split) {
      add_piece(*into, tile, split, split + 1);
    }
    const int64_t end_own = static_cast<int64_t>(into->pieces.size());
    if (shares) {
      add_shared_merges(call, *run, tile, first_own, end_own, *into);
      continue;
    }
    into->merges.push_back({tile, into->parts.size(), static_cast<size_t>(end_own - first_own)});
    for (int64_t piece = first_own; piece < end_own; ++piece) into->parts.push_back({piece, 0});
  }
  into->items.push_back(static_cast<int64_t>(into->pieces.size()));
  place_states(call, *into);
}

void collect_states(const AttendCall& call, const AttentionPieces& from, const Merge& merge, RowState* states) {
  for (size_t i = 0; i < merge.num_parts; ++i) {
    const StateRows& part = from.parts[merge.first_part + i];
    const RowState& state = from.states[part.piece];
    std::copy_n(state.maximum + part.first_row, merge.tile.num_rows, states[i].maximum);
    std::copy_n(state.weight_sum + part.first_row, merge.tile.num_rows, states[i].weight_sum);
    states[i].output = state.output + part.first_row * call.layout.value_dim;
  }
}

}  // namespace penstock
