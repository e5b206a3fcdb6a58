// Matrix products in bfloat16 with AMX tiles, for any number of rows: quantized tiles are first unpacked to bfloat16
// in a buffer that stays in the core's cache, then all rows run over it. Each output element accumulates in float32
// over the inputs in order, 32 at a time, which is the same for one row and for many.
#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma,amx-tile,amx-bf16")

#include "amx.h"
#include "unpack_bf16.h"

namespace penstock {
namespace amx {

// Tiles 0 to 3 accumulate (row block, panel), 4 and 5 hold activations, 6 and 7 weights.
static TileShapes linear_shapes(int64_t rows_low, int64_t rows_high) {
  TileShapes shapes;
  const int64_t rows[8] = {rows_low, rows_low, rows_high, rows_high, rows_low, rows_high, 16, 16};
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, rows[tile], 64);
  return shapes;
}

struct Operands {
  const bf16* x;
  int64_t x_stride_bytes;
  const uint8_t* weights[kStripPanels];
  int64_t num_tiles;
};

template <bool kTwoRowBlocks, bool kTwoPanels>
static void multiply_block(const Operands& in, float* out) {
  constexpr int64_t out_stride = kStripPanels * kPanelOutputs * sizeof(float);
  const bf16* high = in.x + in.x_stride_bytes / 2 * 16;
  _tile_zero(0);
  if (kTwoPanels) _tile_zero(1);
  if (kTwoRowBlocks) _tile_zero(2);
  if (kTwoRowBlocks && kTwoPanels) _tile_zero(3);
  for (int64_t t = 0; t < in.num_tiles; ++t) {
    _tile_loadd(6, in.weights[0] + t * kBf16TileBytes, 64);
    _tile_loadd(4, in.x + t * kTileInputs, in.x_stride_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoPanels) {
      _tile_loadd(7, in.weights[1] + t * kBf16TileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kTwoRowBlocks) {
      _tile_loadd(5, high + t * kTileInputs, in.x_stride_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (kTwoPanels) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_stride);
  if (kTwoPanels) _tile_stored(1, out + 16, out_stride);
  if (kTwoRowBlocks) _tile_stored(2, out + 16 * 32, out_stride);
  if (kTwoRowBlocks && kTwoPanels) _tile_stored(3, out + 16 * 32 + 16, out_stride);
}

void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  alignas(64) float out[32 * kStripPanels * kPanelOutputs];
  Operands in;
  in.x_stride_bytes = call.x_stride * 2;
  in.num_tiles = call.num_tiles;
  unpack_strip(call, strip, scratch, in.weights);
  const bool two_panels = strip.num_panels == 2;
  for (int64_t row = first_row; row < end_row; row += 32) {
    const int64_t low = end_row - row < 16 ? end_row - row : 16;
    const int64_t high = end_row - row - low < 16 ? end_row - row - low : 16;
    use_tiles(linear_shapes(low, high > 0 ? high : 1));
    in.x = static_cast<const bf16*>(call.x) + row * call.x_stride;
    if (high > 0) {
      two_panels ? multiply_block<true, true>(in, out) : multiply_block<true, false>(in, out);
    } else {
      two_panels ? multiply_block<false, true>(in, out) : multiply_block<false, false>(in, out);
    }
    for (int64_t r = 0; r < low + high; ++r) write_strip_row(call, strip, row + r, out + r * 32);
  }
}

}  // namespace amx
}  // namespace penstock

PENSTOCK_TARGET_END

#endif
