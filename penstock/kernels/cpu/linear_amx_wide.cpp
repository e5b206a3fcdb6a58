// Matrix products in bfloat16 with AMX tiles, for many rows: here activations are the first operand, as they lie in
// memory, and weights the second, turned once per strip. That saves packing activations and turning results, which
// for few rows cost less than turning weights. An element's products and the order of their sum are those of
// linear_amx.cpp, and so are its bits.
#include "kernels.h"
#include "target.h"

#if PENSTOCK_HAS_AMX

#include <immintrin.h>

PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma,amx-tile,amx-bf16")

#include "amx.h"
#include "transpose.h"
#include "unpack_bf16.h"

namespace penstock {
namespace amx {

constexpr int64_t kWideBlockRows = 16;
constexpr int64_t kSumStride = kStripPanels * kPanelOutputs;

// Tiles 0 to 3 accumulate (row block, panel), 4 and 5 hold activations, 6 and 7 weights.
static TileShapes wide_shapes(int64_t rows_first, int64_t rows_second) {
  TileShapes shapes;
  const int64_t rows[8] = {rows_first, rows_first, rows_second, rows_second, rows_first, rows_second, 16, 16};
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, rows[tile], 64);
  return shapes;
}

// A strip's tiles as [tile][panel][16 input pairs][16 outputs][2].
static const uint8_t* turn_strip(const LinearCall& call, const Strip& strip) {
  static thread_local Scratch scratch;
  const Part& part = call.parts[strip.part];
  uint8_t* turned = scratch.get<uint8_t>(kStripPanels * call.num_tiles * kBf16TileBytes);
  alignas(64) uint8_t unpacked[kBf16TileBytes];
  for (int64_t tile = 0; tile < call.num_tiles * strip.num_panels; ++tile) {
    const uint8_t* from = strip.data + tile * part.tile_bytes;
    if (part.format != Format::bfloat16) {
      unpack_tile(part, from, unpacked);
      from = unpacked;
    }
    __m512i lines[16];
    for (int i = 0; i < 16; ++i) lines[i] = _mm512_loadu_si512(from + i * 64);
    transpose_16x16(lines);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(turned + tile * kBf16TileBytes + i * 64, lines[i]);
  }
  return turned;
}

template <bool kTwoBlocks, bool kTwoPanels>
static void multiply_wide(const LinearCall& call, const bf16* x, const uint8_t* weights, float* sums) {
  constexpr int64_t step = (kTwoPanels ? 2 : 1) * kBf16TileBytes;
  const int64_t x_bytes = call.x_stride * 2;
  const bf16* second = x + kWideBlockRows * call.x_stride;
  _tile_zero(0);
  if (kTwoPanels) _tile_zero(1);
  if (kTwoBlocks) _tile_zero(2);
  if (kTwoBlocks && kTwoPanels) _tile_zero(3);
  for (int64_t t = 0; t < call.num_tiles; ++t) {
    _tile_loadd(6, weights + t * step, 64);
    _tile_loadd(4, x + t * kTileInputs, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoPanels) {
      _tile_loadd(7, weights + t * step + kBf16TileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kTwoBlocks) {
      _tile_loadd(5, second + t * kTileInputs, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (kTwoPanels) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int64_t stride = kSumStride * sizeof(float);
  _tile_stored(0, sums, stride);
  if (kTwoPanels) _tile_stored(1, sums + 16, stride);
  if (kTwoBlocks) _tile_stored(2, sums + 16 * kSumStride, stride);
  if (kTwoBlocks && kTwoPanels) _tile_stored(3, sums + 16 * kSumStride + 16, stride);
}

void multiply_strip_wide(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  alignas(64) float sums[2 * kWideBlockRows * kSumStride];
  const uint8_t* weights = turn_strip(call, strip);
  const bool two_panels = strip.num_panels == 2;
  for (int64_t row = first_row; row < end_row; row += 2 * kWideBlockRows) {
    const int64_t left = end_row - row;
    const int64_t rows_first = left < kWideBlockRows ? left : kWideBlockRows;
    const int64_t rows_second = left - rows_first < kWideBlockRows ? left - rows_first : kWideBlockRows;
    const bf16* x = static_cast<const bf16*>(call.x) + row * call.x_stride;
    use_tiles(wide_shapes(rows_first, rows_second > 0 ? rows_second : 1));
    const auto multiply = rows_second > 0
                              ? (two_panels ? multiply_wide<true, true> : multiply_wide<true, false>)
                              : (two_panels ? multiply_wide<false, true> : multiply_wide<false, false>);
    multiply(call, x, weights, sums);
    for (int64_t r = 0; r < rows_first + rows_second; ++r) {
      for (int32_t p = 0; p < strip.num_panels; ++p) {
        write_panel_row(call, row + r, strip.first_output + p * kPanelOutputs, strip.num_outputs - p * kPanelOutputs,
                        _mm512_load_ps(sums + r * kSumStride + p * kPanelOutputs));
      }
    }
  }
}

}  // namespace amx
}  // namespace penstock

PENSTOCK_TARGET_END

#endif
