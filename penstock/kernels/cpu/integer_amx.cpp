// Scaled sums of products in whole numbers with AMX tiles: 16 rows of activations are the first operand and 32 inputs of
// a panel the second, both as they lie in memory. Fewer rows, and groups of 16 inputs, take vectors instead, with the
// same bits.
#include "kernels.h"
#include "target.h"

#if PENSTOCK_HAS_AMX

#include <immintrin.h>

PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,f16c,fma,amx-tile,amx-int8")

#define PENSTOCK_ISA amx
#define PENSTOCK_REGISTER_BYTES 64
#define PENSTOCK_NATIVE_BF16
#define PENSTOCK_DOT_PRODUCTS
#include "amx.h"
#include "integer_x86.h"

namespace penstock {
namespace amx {

constexpr int kTileRows = 16;

// Tiles 0 and 1 take sums by turns, 4 holds weights, 6 the codes of the rows.
static TileShapes integer_shapes() {
  TileShapes shapes;
  shapes.set(0, kTileRows, 64);
  shapes.set(1, kTileRows, 64);
  shapes.set(4, kQuadsPerTile, 64);
  shapes.set(6, kTileRows, kTileInputs);
  return shapes;
}

// The compiler's macros take literal tile numbers only.
#define PENSTOCK_SUM_TILE(tile, codes, x, x_stride, to) \
  _tile_zero(tile);                                     \
  _tile_loadd(4, codes, kQuadBytes);                    \
  _tile_loadd(6, x, x_stride);                          \
  _tile_dpbsud(tile, 6, 4);                             \
  _tile_stored(tile, to, 64)

struct TileEngine {
  template <CodeKind kKind, int kGroups>
  static void multiply(const IntegerCall& call, const Part& part, const uint8_t* tiles, const PanelCodes& codes,
                       int64_t row, int64_t rows, float* sums) {
    int64_t r = 0;
    if (kKind != CodeKind::nibbles && kGroups == 1) {
      for (; r + kTileRows <= rows; r += kTileRows) {
        block<kKind>(call, part, tiles, codes, row + r, sums + r * kPanelOutputs);
      }
    }
    if (r < rows) {
      ByteEngine::multiply<kKind, kGroups>(call, part, tiles, codes, row + r, rows - r, sums + r * kPanelOutputs);
    }
  }

  template <CodeKind kKind>
  static void block(const IntegerCall& call, const Part& part, const uint8_t* tiles, const PanelCodes& codes,
                    int64_t row, float* sums) {
    use_tiles(integer_shapes());
    alignas(64) int32_t sum[2][kTileRows * kPanelOutputs];
    __m512 total[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) total[r] = _mm512_setzero_ps();
    const int8_t* x = call.row_codes(row);
    const int64_t x_stride = call.num_tiles * kTileInputs;
    // A tile is summed while the sums of the one before are scaled.
    for (int64_t t = 0; t <= call.num_tiles; ++t) {
      if (t < call.num_tiles && t % 2 == 0) {
        PENSTOCK_SUM_TILE(0, codes.data + t * codes.step, x + t * kTileInputs, x_stride, sum[0]);
      } else if (t < call.num_tiles) {
        PENSTOCK_SUM_TILE(1, codes.data + t * codes.step, x + t * kTileInputs, x_stride, sum[1]);
      }
      if (t > 0) add_tile<kKind>(call, part, tiles, row, t - 1, sum[(t - 1) % 2], total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) _mm512_storeu_ps(sums + r * kPanelOutputs, total[r]);
  }

  template <CodeKind kKind>
  static inline __attribute__((always_inline)) void add_tile(const IntegerCall& call, const Part& part,
                                                             const uint8_t* tiles, int64_t row, int64_t t,
                                                             const int32_t* sum, __m512 (&total)[kTileRows]) {
    const uint8_t* tile = tiles + t * part.tile_bytes;
    const RoundedGroup* groups = call.row_groups(row) + t;
    const __m512 scale = Vector::load_factor(part.half_scales, tile, 0);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const RoundedGroup& group = groups[r * call.num_tiles];
      const __m512i whole = ByteEngine::unbiased<kKind, 1>(_mm512_load_si512(sum + r * kPanelOutputs), group, 0);
      ByteEngine::add_scaled(whole, scale, group.scale, &total[r]);
    }
    if (!part.has_offsets) return;
    const __m512 offset = Vector::load_factor(part.half_scales, tile + part.table_bytes(), 0);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      total[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(groups[r * call.num_tiles].sum), total[r]);
    }
  }
};

void multiply_panels(const IntegerCall& call, const Panel* panels, int64_t num_panels, int64_t first_row,
                     int64_t end_row) {
  multiply_panels_with<TileEngine>(call, panels, num_panels, first_row, end_row);
}

void multiply_gated_panels(const IntegerCall& call, const Panel* gates, const Panel* ups, int64_t num_panels,
                           Activation activation, int64_t first_row, int64_t end_row) {
  multiply_gated_panels_with<TileEngine>(call, gates, ups, num_panels, activation, first_row, end_row);
}

}  // namespace amx
}  // namespace penstock

PENSTOCK_TARGET_END

#endif
