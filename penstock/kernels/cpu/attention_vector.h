// Attention with plain vectors, compiled once per instruction set.
#pragma once

#include "attention_impl.h"
#include "register_tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The engine for plain vectors: products and sums in float32, in blocks of rows and of units or columns.
template <typename CacheElement>
struct VectorEngine {
  using Element = CacheElement;
  using Weight = float;
  // The number of units whose keys or values stay in the first-level cache while all rows of a tile read them.
  static constexpr int64_t kUnitsAtOnce = 4;
  static constexpr int64_t kFewRows = 8;

  static void begin(const AttendCall&, const QueryTile&) {}

  // With few rows, memory is the bottleneck. Units lie at random addresses and are too short for the hardware
  // prefetcher. `units` are the keys or the values of units.
  static void prefetch_units(const QueryTile& tile, const uint8_t* const* units, int64_t first, int64_t num_units,
                             int64_t unit_bytes) {
    if (tile.num_rows > kFewRows) return;
    for (int64_t unit = first; unit < first + kUnitsAtOnce && unit < num_units; ++unit) {
      for (int64_t line = 0; line < unit_bytes; line += 64) __builtin_prefetch(units[unit] + line);
    }
  }

  template <int kRows, int kUnits>
  static void score_units(const float* queries, int64_t key_dim, const uint8_t* const* keys, float* scores) {
    const uint8_t* units[kUnits];
#pragma GCC unroll 4
    for (int i = 0; i < kUnits; ++i) units[i] = keys[i];
    RegisterTile<Element, kRows, kUnits> tile;
    tile.clear();
    tile.add(queries, key_dim, units, kUnitTokens, key_dim);
    tile.store(scores, kScoreStride);
  }

  template <int kRows>
  static void score_rows(const float* queries, int64_t key_dim, const uint8_t* const* keys, int64_t num_units,
                         float* scores) {
    constexpr int most = groups_for(kRows);
    int64_t unit = 0;
    for (; unit + most <= num_units; unit += most) {
      score_units<kRows, most>(queries, key_dim, keys + unit, scores + unit * kUnitTokens);
    }
    for (; unit < num_units; ++unit) {
      score_units<kRows, 1>(queries, key_dim, keys + unit, scores + unit * kUnitTokens);
    }
  }

  static void score(const AttendCall& call, const QueryTile& tile, const uint8_t* const* keys, int64_t num_units,
                    float* scores) {
    const int64_t key_dim = call.layout.key_dim;
    const float* queries = tile_queries<float>(call, tile);
    const int64_t unit_bytes = key_dim * kUnitTokens * static_cast<int64_t>(sizeof(Element));
    for (int64_t unit = 0; unit < num_units; unit += kUnitsAtOnce) {
      prefetch_units(tile, keys, unit + kUnitsAtOnce, num_units, unit_bytes);
      const int64_t count = num_units - unit < kUnitsAtOnce ? num_units - unit : kUnitsAtOnce;
      for_row_groups<kMostTileRows>(tile.num_rows, [&](auto rows, int64_t row) {
        score_rows<decltype(rows)::value>(queries + row * key_dim, key_dim, keys + unit, count,
                                          scores + row * kScoreStride + unit * kUnitTokens);
      });
    }
  }

  template <int kRows, int kGroups>
  static void weigh_columns(const float* weights, const uint8_t* const* values, int64_t num_units, int64_t value_dim,
                            int64_t column, bool is_first, float* output) {
    RegisterTile<Element, kRows, kGroups> tile;
    if (is_first) {
      tile.clear();
    } else {
      tile.load(output + column, value_dim);
    }
    for (int64_t unit = 0; unit < num_units; ++unit) {
      const uint8_t* groups[kGroups];
#pragma GCC unroll 4
      for (int i = 0; i < kGroups; ++i) groups[i] = values[unit] + (column + i * kLanes) * 4;
      tile.add(weights + unit * kUnitTokens, kScoreStride, groups, value_dim, kUnitTokens);
    }
    tile.store(output + column, value_dim);
  }

  template <int kRows>
  static void weigh_rows(const float* weights, const uint8_t* const* values, int64_t num_units, int64_t value_dim,
                         bool is_first, float* output) {
    constexpr int most = groups_for(kRows);
    int64_t column = 0;
    for (; column + most * kLanes <= value_dim; column += most * kLanes) {
      weigh_columns<kRows, most>(weights, values, num_units, value_dim, column, is_first, output);
    }
    for (; column < value_dim; column += kLanes) {
      weigh_columns<kRows, 1>(weights, values, num_units, value_dim, column, is_first, output);
    }
  }

  static void weigh(const AttendCall& call, const QueryTile& tile, const float* weights,
                    const uint8_t* const* values, int64_t num_units, float* output) {
    const int64_t dim = call.layout.value_dim, unit_bytes = dim * kUnitTokens * static_cast<int64_t>(sizeof(Element));
    for (int64_t unit = 0; unit < num_units; unit += kUnitsAtOnce) {
      prefetch_units(tile, values, unit + kUnitsAtOnce, num_units, unit_bytes);
      const int64_t count = num_units - unit < kUnitsAtOnce ? num_units - unit : kUnitsAtOnce;
      for_row_groups<kMostTileRows>(tile.num_rows, [&](auto rows, int64_t row) {
        weigh_rows<decltype(rows)::value>(weights + row * kScoreStride + unit * kUnitTokens, values + unit, count, dim,
                                          unit == 0, output + row * dim);
      });
    }
  }
};

[[maybe_unused]] static void attend_tiles(const AttendCall& call, const QueryTile* tiles, int64_t num_tiles) {
  if (call.dtype == Dtype::float32) return attend_tiles_with<VectorEngine<float>>(call, tiles, num_tiles);
  return attend_tiles_with<VectorEngine<bf16>>(call, tiles, num_tiles);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
