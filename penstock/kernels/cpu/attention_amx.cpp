// Attention in bfloat16 with AMX tiles: the cache's units are the products' second operands as they lie.
#include "kernels.h"
#include "target.h"

#if PENSTOCK_HAS_AMX

#include <immintrin.h>

PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma,amx-tile,amx-bf16")

#define PENSTOCK_ISA amx
#define PENSTOCK_REGISTER_BYTES 64
#define PENSTOCK_NATIVE_BF16
#include "amx.h"
#include "attention_impl.h"
#include "cache_impl.h"

namespace penstock {
namespace amx {

// Tiles 0 to 3 accumulate; 4 holds queries, 5 keys, 6 weights, 7 values.
struct TileEngine {
  using Element = bf16;
  using Weight = bf16;

  static void begin(const AttendCall&, const QueryTile& tile) {
    TileShapes shapes;
    for (int accumulator = 0; accumulator < 4; ++accumulator) shapes.set(accumulator, tile.num_rows, 64);
    shapes.set(4, tile.num_rows, 64);
    shapes.set(5, 16, 64);
    shapes.set(6, tile.num_rows, 32);
    shapes.set(7, 8, 64);
    use_tiles(shapes);
  }

  template <int kUnits>
  static void score_units(const bf16* queries, int64_t key_dim, const uint8_t* const* keys, float* scores) {
    constexpr int64_t stride = kScoreStride * sizeof(float);
    _tile_zero(0);
    if (kUnits > 1) _tile_zero(1);
    if (kUnits > 2) _tile_zero(2);
    if (kUnits > 3) _tile_zero(3);
    for (int64_t d = 0; d < key_dim; d += 32) {
      const int64_t at = d * kUnitTokens * 2;
      _tile_loadd(4, queries + d, key_dim * 2);
      _tile_loadd(5, keys[0] + at, 64);
      _tile_dpbf16ps(0, 4, 5);
      if (kUnits > 1) {
        _tile_loadd(5, keys[1] + at, 64);
        _tile_dpbf16ps(1, 4, 5);
      }
      if (kUnits > 2) {
        _tile_loadd(5, keys[2] + at, 64);
        _tile_dpbf16ps(2, 4, 5);
      }
      if (kUnits > 3) {
        _tile_loadd(5, keys[3] + at, 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, scores, stride);
    if (kUnits > 1) _tile_stored(1, scores + 16, stride);
    if (kUnits > 2) _tile_stored(2, scores + 32, stride);
    if (kUnits > 3) _tile_stored(3, scores + 48, stride);
  }

  static void score(const AttendCall& call, const QueryTile& tile, const uint8_t* const* keys, int64_t num_units,
                    float* scores) {
    const int64_t key_dim = call.layout.key_dim;
    const bf16* queries = tile_queries<bf16>(call, tile);
    for (int64_t unit = 0; unit < num_units; unit += 4) {
      float* to = scores + unit * kUnitTokens;
      switch (num_units - unit) {
        case 1: score_units<1>(queries, key_dim, keys + unit, to); break;
        case 2: score_units<2>(queries, key_dim, keys + unit, to); break;
        case 3: score_units<3>(queries, key_dim, keys + unit, to); break;
        default: score_units<4>(queries, key_dim, keys + unit, to);
      }
    }
  }

  template <int kColumns>
  static void weigh_columns(const bf16* weights, const uint8_t* const* values, int64_t num_units, int64_t value_dim,
                            int64_t column, float* output) {
    _tile_zero(0);
    if (kColumns > 1) _tile_zero(1);
    if (kColumns > 2) _tile_zero(2);
    if (kColumns > 3) _tile_zero(3);
    for (int64_t unit = 0; unit < num_units; ++unit) {
      const uint8_t* from = values[unit] + column * 4;
      _tile_loadd(6, weights + unit * kUnitTokens, kScoreStride * 2);
      _tile_loadd(7, from, value_dim * 4);
      _tile_dpbf16ps(0, 6, 7);
      if (kColumns > 1) {
        _tile_loadd(7, from + 64, value_dim * 4);
        _tile_dpbf16ps(1, 6, 7);
      }
      if (kColumns > 2) {
        _tile_loadd(7, from + 128, value_dim * 4);
        _tile_dpbf16ps(2, 6, 7);
      }
      if (kColumns > 3) {
        _tile_loadd(7, from + 192, value_dim * 4);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    float* to = output + column;
    _tile_stored(0, to, value_dim * 4);
    if (kColumns > 1) _tile_stored(1, to + 16, value_dim * 4);
    if (kColumns > 2) _tile_stored(2, to + 32, value_dim * 4);
    if (kColumns > 3) _tile_stored(3, to + 48, value_dim * 4);
  }

  static void weigh(const AttendCall& call, const QueryTile&, const bf16* weights, const uint8_t* const* values,
                    int64_t num_units, float* output) {
    const int64_t dim = call.layout.value_dim;
    for (int64_t column = 0; column < dim; column += 64) {
      switch ((dim - column) / 16) {
        case 1: weigh_columns<1>(weights, values, num_units, dim, column, output); break;
        case 2: weigh_columns<2>(weights, values, num_units, dim, column, output); break;
        case 3: weigh_columns<3>(weights, values, num_units, dim, column, output); break;
        default: weigh_columns<4>(weights, values, num_units, dim, column, output);
      }
    }
  }
};

void attend_tiles_bf16(const AttendCall& call, const QueryTile* tiles, int64_t num_tiles) {
  attend_tiles_with<TileEngine>(call, tiles, num_tiles);
}

void store_token_bf16(const AttendCall& call, int64_t token) { store_token_as<bf16, bf16>(call, token); }

}  // namespace amx
}  // namespace penstock

PENSTOCK_TARGET_END

#endif
