// Attention of one tile of query rows, compiled once per instruction set. An Engine supplies the two matrix
// products; softmax, masking and merging are shared, so every engine has the same invariants.
#pragma once

#include "attention.h"
#include "vec_math.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The distance between rows of scores is no power of two, so that rows use different sets of the cache.
constexpr int kScoreStride = kSplitTokens + kLanes;

// The units of a split that were converted last. The next tile reuses them if it reads the same units.
struct WrittenUnits {
  const uint8_t* from[kSplitUnits];

  void forget() { memset(from, 0, sizeof from); }
};

template <typename Weight>
struct AttendScratch {
  alignas(64) float scores[kTileRows * kScoreStride];
  alignas(64) Weight weights[kTileRows * kScoreStride];
  alignas(64) float split_output[kTileRows * kMaxHeadDim];
  alignas(64) uint8_t last_keys[kUnitTokens * kMaxHeadDim * 4];
  alignas(64) uint8_t last_values[kUnitTokens * kMaxHeadDim * 4];
  const uint8_t* keys[kSplitUnits];
  const uint8_t* values[kSplitUnits];
  WrittenUnits written;
};

// The keys that the rows of a tile may see: row r sees keys [first(r), end(r)).
struct Sight {
  int64_t first_position;
  int64_t heads;
  int64_t first_row;
  int64_t window;

  int64_t end(int64_t row) const { return first_position + (first_row + row) / heads + 1; }
  int64_t first(int64_t row) const {
    const int64_t last = end(row);
    return last > window ? last - window : 0;
  }
};

PENSTOCK_INLINE Sight sight_of(const AttendCall& call, const QueryTile& tile) {
  constexpr int64_t far = int64_t{1} << 40;
  if (tile.sees_all) return {far, 1, 0, 2 * far};
  const int32_t* starts = call.batch->query_starts + tile.request;
  const int64_t num_queries = starts[1] - starts[0];
  return {call.batch->context_lens[tile.request] - num_queries, call.heads_per_kv_head(), tile.first_row,
          call.layer->window};
}

// The units of a row's scores that the row sees. Column 0 is key `start`.
struct RowUnits {
  int64_t first_seen;    // the first unit that the row sees
  int64_t end_seen;      // the unit behind the last unit that the row sees
  bool cut_first;        // whether the row sees only some keys of the first unit,
  bool cut_last;         // and of the last
};

PENSTOCK_INLINE RowUnits row_units(int64_t num_units, int64_t start, int64_t first, int64_t end) {
  const int64_t from = first > start ? first - start : 0;
  const int64_t to = end - start < num_units * kUnitTokens ? end - start : num_units * kUnitTokens;
  if (to <= from) return {0, 0, false, false};
  return {from / kUnitTokens, ceil_div(to, kUnitTokens), from % kUnitTokens != 0, to % kUnitTokens != 0};
}

// The weight of a score, and the factor by which the score is multiplied before.
PENSTOCK_INLINE Floats weight_of(const float*, Floats x) { return exponential<false>(x); }
PENSTOCK_INLINE Floats weight_of(const bf16*, Floats x) { return rough_power_of_two(x); }
PENSTOCK_INLINE float weight_base(const float*) { return 1.0f; }
PENSTOCK_INLINE float weight_base(const bf16*) { return kLog2OfE; }

// Returns the highest score of a row, and ignores NaN. Takes two units at a time, which do not depend on each other.
PENSTOCK_INLINE float highest_score(const float* scores, int64_t unit, int64_t end_unit) {
  Floats highest = broadcast(-__builtin_inff()), of_odd = highest;
  for (; unit + 2 <= end_unit; unit += 2) {
    highest = maximum(load(scores + unit * kUnitTokens), highest);
    of_odd = maximum(load(scores + (unit + 1) * kUnitTokens), of_odd);
  }
  if (unit < end_unit) highest = maximum(load(scores + unit * kUnitTokens), highest);
  return reduce_max(maximum(highest, of_odd));
}

// The weights of score * steep + shift, and their sum.
template <typename Weight>
PENSTOCK_INLINE float weigh_scores(const float* scores, Weight* weights, int64_t unit, int64_t end_unit, Floats steep,
                                   Floats shift) {
  const auto weight_at = [&](int64_t at) {
    return weight_of(weights, multiply_add(load(scores + at * kUnitTokens), steep, shift));
  };
  Floats sum = zeros();
  if constexpr (kRegisters == 1) {  // more would not fit the registers
    for (; unit + 2 <= end_unit; unit += 2) {
      const Floats weight = weight_at(unit), next = weight_at(unit + 1);
      sum = sum + weight + next;
      store_two(weights + unit * kUnitTokens, weight, next);
    }
  }
  for (; unit < end_unit; ++unit) {
    const Floats weight = weight_at(unit);
    sum = sum + weight;
    store(weights + unit * kUnitTokens, weight);
  }
  return reduce_sum(sum);
}

// Scores of one row → weights, their maximum and their sum. The row sees keys [first, end).
template <typename Weight>
static void soften_row(const AttentionLayer& layer, float* scores, Weight* weights, int64_t num_units, int64_t start,
                       int64_t first, int64_t end, float* maximum_out, float* sum_out) {
  const RowUnits seen = row_units(num_units, start, first, end);
  const auto hide = [&](int64_t unit) {
    float* at = scores + unit * kUnitTokens;
    store(at, keep_between(load(at), lane_indices(), start + unit * kUnitTokens, first, end, -__builtin_inff()));
  };
  Floats factor = broadcast(layer.scale);
  if (layer.softcap > 0) {
    const Floats cap = broadcast(layer.softcap);
    for (int64_t unit = seen.first_seen; unit < seen.end_seen; ++unit) {
      float* at = scores + unit * kUnitTokens;
      store(at, cap * hyperbolic_tangent(load(at) * factor / cap));
    }
    factor = broadcast(1.0f);
  }
  if (seen.cut_first) hide(seen.first_seen);
  if (seen.cut_last) hide(seen.end_seen - 1);
  const float top = highest_score(scores, seen.first_seen, seen.end_seen);
  // The row sees no key, or only scores of NaN. Its sum of weights stays 0, and 0 / 0 is NaN in the output.
  const bool blind = top == -__builtin_inff();
  const int64_t first_unit = blind ? 0 : seen.first_seen, end_unit = blind ? 0 : seen.end_seen;
  const Floats steep = factor * broadcast(weight_base(weights)), shift = zeros() - broadcast(top) * steep;
  for (int64_t unit = 0; unit < first_unit; ++unit) store(weights + unit * kUnitTokens, zeros());
  *sum_out = weigh_scores(scores, weights, first_unit, end_unit, steep, shift);
  for (int64_t unit = end_unit; unit < num_units; ++unit) store(weights + unit * kUnitTokens, zeros());
  *maximum_out = blind ? top : top * factor.part[0][0];
}

// Adds a later split's state to an earlier one's.
static void merge_states(RowState& into, const RowState& from, int64_t num_rows, int64_t value_dim) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const float later = from.maximum[row], earlier = into.maximum[row];
    if (later == -__builtin_inff()) continue;
    float* to = into.output + row * value_dim;
    const float* add = from.output + row * value_dim;
    if (earlier == -__builtin_inff()) {
      into.maximum[row] = later;
      into.weight_sum[row] = from.weight_sum[row];
      for (int64_t d = 0; d < value_dim; d += kLanes) store(to + d, load(add + d));
      continue;
    }
    const float top = later > earlier ? later : earlier;
    const Floats keep = exponential(broadcast(earlier - top)), gain = exponential(broadcast(later - top));
    into.maximum[row] = top;
    const Floats sum = multiply_add(broadcast(into.weight_sum[row]), keep, broadcast(from.weight_sum[row]) * gain);
    into.weight_sum[row] = sum.part[0][0];
    for (int64_t d = 0; d < value_dim; d += kLanes) {
      store(to + d, multiply_add(load(to + d), keep, load(add + d) * gain));
    }
  }
}

// Returns the sum of a row's weights, including the weight of the sink. A row without visible keys keeps the sum 0.
PENSTOCK_INLINE float sum_with_sink(const AttentionLayer& layer, int64_t head, float maximum, float weight_sum) {
  if (layer.sinks == nullptr || maximum == -__builtin_inff()) return weight_sum;
  return weight_sum + exponential(broadcast(layer.sinks[head] - maximum)).part[0][0];
}

template <typename Element>
static void write_rows(const AttendCall& call, const QueryTile& tile, const RowState& state) {
  const int64_t heads = call.heads_per_kv_head(), dim = call.layer->head_dim;
  int64_t token = call.batch->query_starts[tile.request] + tile.first_row / heads, head = tile.first_row % heads;
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    const int64_t query_head = tile.kv_head * heads + head;
    Element* to = static_cast<Element*>(call.out) + (token * call.layer->num_heads + query_head) * dim;
    const Floats divide =
        broadcast(1.0f / sum_with_sink(*call.layer, query_head, state.maximum[row], state.weight_sum[row]));
    const float* from = state.output + row * call.layout.value_dim;
    for (int64_t d = 0; d < dim; d += kLanes) store_some(to + d, load(from + d) * divide, dim - d);
    if (++head == heads) {
      head = 0;
      ++token;
    }
  }
}

// The keys of a unit whose tokens begin at `offset`, as if they began at 0. Each row has four bytes of every token.
static const uint8_t* keys_from(const AttendCall& call, const uint8_t* keys, int64_t offset, uint8_t* copy) {
  constexpr int64_t row_bytes = kUnitTokens * 4;
  const int64_t rows = call.dtype == Dtype::float32 ? call.layout.key_dim : call.layout.key_dim / 2;
  for (int64_t row = 0; row < rows; ++row) {
    memcpy(copy + row * row_bytes, keys + row * row_bytes + offset * 4, kHalfTokens * 4);
  }
  return copy;
}

// The values of the `num_tokens` of a unit that begin at `offset`. Slots past the context may hold anything, NaN
// included, which a zero weight would not silence.
template <typename Element>
static const uint8_t* values_from(const AttendCall& call, const uint8_t* values, int64_t offset, int64_t num_tokens,
                                  uint8_t* copy) {
  const int64_t dim = call.layout.value_dim, token_bytes = dim * static_cast<int64_t>(sizeof(Element));
  memcpy(copy, values + offset * token_bytes, static_cast<size_t>((kUnitTokens - offset) * token_bytes));
  Element* elements = reinterpret_cast<Element*>(copy);
  if (sizeof(Element) == 4) {
    memset(elements + num_tokens * dim, 0, static_cast<size_t>((kUnitTokens - num_tokens) * dim) * sizeof(Element));
    return copy;
  }
  const int64_t half_filled = num_tokens / 2;
  if (num_tokens % 2 != 0) {
    for (int64_t d = 0; d < dim; ++d) elements[(half_filled * dim + d) * 2 + 1] = 0;
  }
  const int64_t empty = (num_tokens + 1) / 2;
  memset(elements + empty * dim * 2, 0, static_cast<size_t>((kUnitTokens / 2 - empty) * dim * 2) * sizeof(Element));
  return copy;
}

// Rows 2i and 2i + 1 of a matrix in the cache's layout, from `column` on.
PENSTOCK_INLINE void place_rows(float* matrix, int64_t row, int64_t columns, int64_t column, Floats first,
                                Floats second) {
  store(matrix + row * columns + column, first);
  store(matrix + (row + 1) * columns + column, second);
}

PENSTOCK_INLINE void place_rows(bf16* matrix, int64_t row, int64_t columns, int64_t column, Floats first,
                                Floats second) {
  store_by_turns(matrix + row * columns + column * 2, first, second);
}

// The keys and values of a unit that is kept in eight bits, as they would lie if they were kept in `Element`.
template <typename Element>
static void write_out(const CacheLayout& layout, const uint8_t* unit, Element* keys, Element* values) {
  const int8_t* key_codes = reinterpret_cast<const int8_t*>(unit);
  const int8_t* value_codes = key_codes + layout.keys_bytes();
  const float* scales = reinterpret_cast<const float*>(value_codes + layout.values_bytes());
  const Floats key_scales = load(scales);
  for (int64_t d = 0; d < layout.key_dim; d += 2) {
    const int8_t* codes = key_codes + d * kUnitTokens;
    place_rows(keys, d, kUnitTokens, 0, load_bytes(codes) * key_scales, load_bytes(codes + kUnitTokens) * key_scales);
  }
  for (int64_t token = 0; token < kUnitTokens; token += 2) {
    const Floats first = broadcast(scales[kUnitTokens + token]), second = broadcast(scales[kUnitTokens + token + 1]);
    const int8_t* codes = value_codes + token * layout.value_dim;
    for (int64_t d = 0; d < layout.value_dim; d += kLanes) {
      place_rows(values, token, layout.value_dim, d, load_bytes(codes + d) * first,
                 load_bytes(codes + layout.value_dim + d) * second);
    }
  }
}

// The units of a split from `first` on: their keys and values are replaced by those in `Element`.
template <typename Element>
static void write_out_units(const CacheLayout& layout, int64_t first, int64_t num_units, WrittenUnits& written,
                            const uint8_t** keys, const uint8_t** values) {
  static thread_local Scratch room;
  const int64_t key_count = layout.key_dim * kUnitTokens, value_count = layout.value_dim * kUnitTokens;
  Element* to = room.get<Element>(kSplitUnits * (key_count + value_count)) + first * (key_count + value_count);
  for (int64_t i = 0; i < num_units; ++i) {
    if (written.from[first + i] != keys[i]) write_out(layout, keys[i], to, to + key_count);
    written.from[first + i] = keys[i];
    keys[i] = reinterpret_cast<const uint8_t*>(to);
    values[i] = reinterpret_cast<const uint8_t*>(to + key_count);
    to += key_count + value_count;
  }
}

template <typename Engine>
static void attend_split(const AttendCall& call, const QueryTile& tile, const Sight& sight, int64_t split,
                         AttendScratch<typename Engine::Weight>& scratch, RowState& state) {
  const int64_t context_len = call.batch->context_lens[tile.request];
  const int64_t see_first = sight.first(0), see_end = sight.end(tile.num_rows - 1);
  int64_t unit = split * kSplitUnits, end_unit = unit + kSplitUnits;
  if (see_first / kUnitTokens > unit) unit = see_first / kUnitTokens;
  if (ceil_div(see_end, kUnitTokens) < end_unit) end_unit = ceil_div(see_end, kUnitTokens);
  const int64_t start = unit * kUnitTokens, num_units = end_unit - unit;

  for (int64_t i = 0; i < num_units; ++i) {
    scratch.keys[i] = call.keys(call.unit_of(tile.request, unit + i), tile.kv_head);
    scratch.values[i] = scratch.keys[i] + call.layout.keys_bytes();
  }
  if (call.layout.rounded) {
    write_out_units<typename Engine::Element>(call.layout, unit - split * kSplitUnits, num_units, scratch.written,
                                              scratch.keys, scratch.values);
  }
  const int64_t filled = context_len - (end_unit - 1) * kUnitTokens;
  if (filled < kUnitTokens) {
    const int64_t offset = call.tail_offset(tile.request);
    const uint8_t *&keys = scratch.keys[num_units - 1], *&values = scratch.values[num_units - 1];
    if (offset != 0) keys = keys_from(call, keys, offset, scratch.last_keys);
    values = values_from<typename Engine::Element>(call, values, offset, filled, scratch.last_values);
  }
  Engine::score(call, tile, scratch.keys, num_units, scratch.scores);
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    soften_row(*call.layer, scratch.scores + row * kScoreStride, scratch.weights + row * kScoreStride, num_units,
               start, sight.first(row), sight.end(row), &state.maximum[row], &state.weight_sum[row]);
  }
  Engine::weigh(call, tile, scratch.weights, scratch.values, num_units, state.output);
}

// Split by split, so that all tiles read a split's keys and values while these are in the core's cache.
template <typename Engine>
static void attend_tiles_together(const AttendCall& call, const QueryTile* tiles, int64_t num_tiles) {
  static thread_local AttendScratch<typename Engine::Weight> scratch;
  static thread_local Scratch outputs;
  const int64_t output_size = kTileRows * call.layout.value_dim;
  float* output = outputs.get<float>(num_tiles * output_size);
  RowState own[kTilesAtOnce], part;
  part.output = scratch.split_output;
  scratch.written.forget();
  int64_t split = tiles[0].first_split, end_split = tiles[0].end_split;
  for (int64_t i = 0; i < num_tiles; ++i) {
    own[i].output = output + i * output_size;
    if (tiles[i].first_split < split) split = tiles[i].first_split;
    if (tiles[i].end_split > end_split) end_split = tiles[i].end_split;
  }
  for (; split < end_split; ++split) {
    for (int64_t i = 0; i < num_tiles; ++i) {
      const QueryTile& tile = tiles[i];
      if (split < tile.first_split || split >= tile.end_split) continue;
      RowState& whole = tile.partial != nullptr ? *tile.partial : own[i];
      const bool is_first = split == tile.first_split;
      Engine::begin(call, tile);
      attend_split<Engine>(call, tile, sight_of(call, tile), split, scratch, is_first ? whole : part);
      if (!is_first) merge_states(whole, part, tile.num_rows, call.layout.value_dim);
    }
  }
  for (int64_t i = 0; i < num_tiles; ++i) {
    if (tiles[i].partial == nullptr) write_rows<typename Engine::Element>(call, tiles[i], own[i]);
  }
}

template <typename Engine>
static void attend_tiles_with(const AttendCall& call, const QueryTile* tiles, int64_t num_tiles) {
  for (int64_t i = 0; i < num_tiles; i += kTilesAtOnce) {
    attend_tiles_together<Engine>(call, tiles + i, num_tiles - i < kTilesAtOnce ? num_tiles - i : kTilesAtOnce);
  }
}

template <typename Element>
static void merge_tile_as(const AttendCall& call, const QueryTile& tile, const RowState* partials, int64_t count) {
  RowState whole = partials[0];
  for (int64_t i = 1; i < count; ++i) merge_states(whole, partials[i], tile.num_rows, call.layout.value_dim);
  write_rows<Element>(call, tile, whole);
}

[[maybe_unused]] static void merge_tile(const AttendCall& call, const QueryTile& tile, const RowState* partials,
                                        int64_t count) {
  if (call.dtype == Dtype::float32) return merge_tile_as<float>(call, tile, partials, count);
  return merge_tile_as<bf16>(call, tile, partials, count);
}

template <typename Query>
PENSTOCK_INLINE const Query* tile_queries(const AttendCall& call, const QueryTile& tile) {
  const int64_t first_token = call.batch->query_starts[tile.request];
  const int64_t row =
      (tile.kv_head * call.batch->num_tokens + first_token) * call.heads_per_kv_head() + tile.first_row;
  return static_cast<const Query*>(call.queries) + row * call.layout.key_dim;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
