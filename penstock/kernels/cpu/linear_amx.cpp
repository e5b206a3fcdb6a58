// Matrix products in bfloat16 with AMX tiles, for any number of rows. Weights are the first operand, 16 outputs a
// tile, and activations the second, up to 16 rows a tile, so a product comes out with outputs down and rows across.
// Quantized tiles are unpacked to bfloat16 in a buffer that stays in the core's cache while all rows use it. Each
// output element accumulates in float32 over the inputs in order, which is the same for one row and for many.
#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma,amx-tile,amx-bf16")

#include "amx.h"
#include "transpose.h"
#include "unpack_bf16.h"

namespace penstock {
namespace amx {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kItemRows = 2 * kBlockRows;

void forget_tiles() { shapes_in_force.palette = 0; }

// Blocks of 16 rows (the last may have fewer) → [tiles][16 input pairs][rows of the block][2].
void pack_activations(const LinearCall& call, const bf16* x, int64_t first_row, int64_t num_rows, bf16* to) {
  const int64_t padded = call.num_tiles * kTileInputs;
  bf16* block = to + first_row * padded;
  const __mmask16 rows_mask = static_cast<__mmask16>((1u << num_rows) - 1);
  for (int64_t input = 0; input < padded; input += kTileInputs) {
    const int64_t left = call.in_features - input;
    const __mmask32 mask = left >= kTileInputs ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    __m512i rows[16];
    for (int64_t r = 0; r < 16; ++r) {
      const bf16* from = x + (first_row + r) * call.in_features + input;
      rows[r] = r < num_rows ? _mm512_maskz_loadu_epi16(mask, from) : _mm512_setzero_si512();
    }
    transpose_16x16(rows);
    uint32_t* pairs = reinterpret_cast<uint32_t*>(block + input * num_rows);
    for (int64_t pair = 0; pair < 16; ++pair) {
      _mm512_mask_storeu_epi32(pairs + pair * num_rows, rows_mask, rows[pair]);
    }
  }
}

// Tiles 0 to 3 accumulate (panel, row block), 4 and 5 hold weights, 6 and 7 activations.
static TileShapes linear_shapes(int64_t rows_first, int64_t rows_second) {
  TileShapes shapes;
  const int64_t across[8] = {rows_first, rows_second, rows_first, rows_second, 16, 16, rows_first, rows_second};
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, across[tile] * 4);
  return shapes;
}

struct Operands {
  const Part* part;
  const uint8_t* packed[kStripPanels];
  uint8_t* unpacked[kStripPanels];  // same as packed where no unpacking is needed
  const bf16* x[2];
  int64_t rows[2];
  int64_t num_tiles;
};

template <bool kTwoPanels>
static inline void unpack_tiles(const Operands& in, int64_t t) {
  for (int p = 0; p < (kTwoPanels ? 2 : 1); ++p) {
    unpack_tile(*in.part, in.packed[p] + t * in.part->tile_bytes, in.unpacked[p] + t * kBf16TileBytes);
  }
}

// How many steps unpacking runs ahead of the products, so that these find their tiles written.
constexpr int64_t kStepsAhead = 2;

template <bool kTwoPanels, bool kTwoBlocks, bool kUnpack>
static void multiply_block(const Operands& in, float* sums) {
  const int64_t stride0 = in.rows[0] * 4, stride1 = in.rows[1] * 4;
  const bf16 *x0 = in.x[0], *x1 = in.x[1];
  _tile_zero(0);
  if (kTwoBlocks) _tile_zero(1);
  if (kTwoPanels) _tile_zero(2);
  if (kTwoPanels && kTwoBlocks) _tile_zero(3);
  for (int64_t t = 0; kUnpack && t < kStepsAhead && t < in.num_tiles; ++t) unpack_tiles<kTwoPanels>(in, t);
  for (int64_t t = 0; t < in.num_tiles; ++t) {
    if (kUnpack && t + kStepsAhead < in.num_tiles) unpack_tiles<kTwoPanels>(in, t + kStepsAhead);
    _tile_loadd(6, x0 + t * kTileInputs * in.rows[0], stride0);
    _tile_loadd(4, in.unpacked[0] + t * kBf16TileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoPanels) {
      _tile_loadd(5, in.unpacked[1] + t * kBf16TileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (kTwoBlocks) {
      _tile_loadd(7, x1 + t * kTileInputs * in.rows[1], stride1);
      _tile_dpbf16ps(1, 4, 7);
      if (kTwoPanels) _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int64_t tile_floats = 256;
  _tile_stored(0, sums, stride0);
  if (kTwoBlocks) _tile_stored(1, sums + tile_floats, stride1);
  if (kTwoPanels) _tile_stored(2, sums + 2 * tile_floats, stride0);
  if (kTwoPanels && kTwoBlocks) _tile_stored(3, sums + 3 * tile_floats, stride1);
}

template <bool kUnpack>
static void multiply_any(const Operands& in, bool two_panels, bool two_blocks, float* sums) {
  if (two_blocks) {
    return two_panels ? multiply_block<true, true, kUnpack>(in, sums) : multiply_block<false, true, kUnpack>(in, sums);
  }
  return two_panels ? multiply_block<true, false, kUnpack>(in, sums) : multiply_block<false, false, kUnpack>(in, sums);
}

// One accumulator, [16 outputs][rows] → rows of y.
static void write_tile(const LinearCall& call, int64_t row, int64_t num_rows, int64_t output, int64_t count,
                       const float* sums) {
  if (num_rows == 1) return write_panel_row(call, row, output, count, _mm512_load_ps(sums));
  const __mmask16 mask = static_cast<__mmask16>((1u << num_rows) - 1);
  __m512i lines[16];
  for (int o = 0; o < 16; ++o) lines[o] = _mm512_maskz_loadu_epi32(mask, sums + o * num_rows);
  transpose_16x16(lines);
  for (int64_t r = 0; r < num_rows; ++r) {
    write_panel_row(call, row + r, output, count, _mm512_castsi512_ps(lines[r]));
  }
}

void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  alignas(64) float sums[4 * 256];
  Operands in;
  in.part = call.parts + strip.part;
  in.num_tiles = call.num_tiles;
  const bool dense = in.part->format == Format::bfloat16;
  uint8_t* unpacked = dense ? nullptr : scratch.get<uint8_t>(kStripPanels * call.num_tiles * kBf16TileBytes);
  for (int32_t p = 0; p < strip.num_panels; ++p) {
    in.packed[p] = in.part->panel(strip.first_panel + p);
    in.unpacked[p] = dense ? const_cast<uint8_t*>(in.packed[p]) : unpacked + p * call.num_tiles * kBf16TileBytes;
  }
  bool unpack = !dense;
  for (int64_t row = first_row; row < end_row; row += kItemRows) {
    const int64_t left = end_row - row;
    in.rows[0] = left < kBlockRows ? left : kBlockRows;
    in.rows[1] = left - in.rows[0] < kBlockRows ? left - in.rows[0] : kBlockRows;
    const bool two_blocks = in.rows[1] > 0;
    for (int b = 0; b < 2; ++b) {
      in.x[b] = static_cast<const bf16*>(call.x) + (row + b * kBlockRows) * call.num_tiles * kTileInputs;
    }
    use_tiles(linear_shapes(in.rows[0], two_blocks ? in.rows[1] : 1));
    if (unpack) {
      multiply_any<true>(in, strip.num_panels == 2, two_blocks, sums);
    } else {
      multiply_any<false>(in, strip.num_panels == 2, two_blocks, sums);
    }
    unpack = false;
    for (int32_t p = 0; p < strip.num_panels; ++p) {
      for (int b = 0; b < (two_blocks ? 2 : 1); ++b) {
        write_tile(call, row + b * kBlockRows, in.rows[b], strip.first_output + p * kPanelOutputs,
                   strip.num_outputs - p * kPanelOutputs, sums + (2 * p + b) * 256);
      }
    }
  }
}

}  // namespace amx
}  // namespace penstock

PENSTOCK_TARGET_END

#endif
