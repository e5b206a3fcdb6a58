// Matrix products in bfloat16 with AMX tiles, for any number of rows. Weights are the first operand, 16 outputs a
// tile, and activations the second, up to 16 rows a tile, so a product comes out with outputs down and rows across.
// Quantized tiles are unpacked to bfloat16 in a buffer that stays in the core's cache while all rows use it. Each
// output element accumulates in float32 over the inputs in order, which is the same for one row and for many.
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
  const uint8_t* packed;    // a strip
  const uint8_t* next;      // the strip this thread will probably take next
  uint8_t* unpacked;        // [tile][panel]; the same as packed where no unpacking is needed
  const bf16* x[2];
  int64_t rows[2];
  int64_t num_tiles;
};

// How many steps unpacking runs ahead of the products, so that these find their tiles written.
constexpr int64_t kStepsAhead = 5;
// How far ahead of its use memory is asked for. Strips are too short for the processor to find out by itself.
constexpr int64_t kPrefetchBytes = 4096;

static inline void prefetch_step(const Operands& in, int64_t step_bytes, int64_t t) {
  const int64_t strip_bytes = in.num_tiles * step_bytes;
  const int64_t at = t * step_bytes + kPrefetchBytes;
  const uint8_t* from = at < strip_bytes ? in.packed + at : in.next + (at - strip_bytes);
  for (int64_t line = 0; line < step_bytes; line += 64) _mm_prefetch(from + line, _MM_HINT_T0);
}

// The first pass over a strip fetches it from memory and unpacks it, the others find it ready.
template <bool kTwoPanels, bool kTwoBlocks, bool kFirstPass>
static void multiply_block(const Operands& in, float* sums) {
  constexpr int64_t num_panels = kTwoPanels ? 2 : 1;
  constexpr int64_t step = num_panels * kBf16TileBytes;
  const int64_t packed_step = num_panels * in.part->tile_bytes;
  const int64_t stride0 = in.rows[0] * 4, stride1 = in.rows[1] * 4;
  const bool unpack = kFirstPass && in.unpacked != in.packed;
  const auto fetch = [&](int64_t t) {
    prefetch_step(in, packed_step, t);
    for (int64_t p = 0; unpack && p < num_panels; ++p) {
      unpack_tile(*in.part, in.packed + t * packed_step + p * in.part->tile_bytes,
                  in.unpacked + t * step + p * kBf16TileBytes);
    }
  };
  _tile_zero(0);
  if (kTwoBlocks) _tile_zero(1);
  if (kTwoPanels) _tile_zero(2);
  if (kTwoPanels && kTwoBlocks) _tile_zero(3);
  for (int64_t t = 0; kFirstPass && t < kStepsAhead && t < in.num_tiles; ++t) fetch(t);
  for (int64_t t = 0; t < in.num_tiles; ++t) {
    if (kFirstPass && t + kStepsAhead < in.num_tiles) fetch(t + kStepsAhead);
    _tile_loadd(6, in.x[0] + t * kTileInputs * in.rows[0], stride0);
    _tile_loadd(4, in.unpacked + t * step, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoPanels) {
      _tile_loadd(5, in.unpacked + t * step + kBf16TileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (kTwoBlocks) {
      _tile_loadd(7, in.x[1] + t * kTileInputs * in.rows[1], stride1);
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

template <bool kTwoPanels, bool kTwoBlocks>
static void multiply_pass(const Operands& in, bool first_pass, float* sums) {
  if (first_pass) return multiply_block<kTwoPanels, kTwoBlocks, true>(in, sums);
  return multiply_block<kTwoPanels, kTwoBlocks, false>(in, sums);
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

static Operands strip_operands(const LinearCall& call, const Strip& strip) {
  static thread_local Scratch scratch;
  Operands in = {};
  in.part = call.parts + strip.part;
  in.num_tiles = call.num_tiles;
  in.packed = strip.data;
  const Strip* next = &strip + call.strips_at_once;
  in.next = next < call.strips + call.num_strips ? next->data : strip.data;
  in.unpacked = in.part->format == Format::bfloat16
                    ? const_cast<uint8_t*>(strip.data)
                    : scratch.get<uint8_t>(kStripPanels * call.num_tiles * kBf16TileBytes);
  return in;
}

void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  alignas(64) float sums[4 * 256];
  Operands in = strip_operands(call, strip);
  for (int64_t row = first_row; row < end_row; row += kItemRows) {
    const int64_t left = end_row - row;
    in.rows[0] = left < kBlockRows ? left : kBlockRows;
    in.rows[1] = left - in.rows[0] < kBlockRows ? left - in.rows[0] : kBlockRows;
    const bool two_blocks = in.rows[1] > 0, first_pass = row == first_row;
    for (int b = 0; b < 2; ++b) {
      in.x[b] = static_cast<const bf16*>(call.x) + (row + b * kBlockRows) * call.num_tiles * kTileInputs;
    }
    use_tiles(linear_shapes(in.rows[0], two_blocks ? in.rows[1] : 1));
    if (strip.num_panels == 2) {
      two_blocks ? multiply_pass<true, true>(in, first_pass, sums) : multiply_pass<true, false>(in, first_pass, sums);
    } else {
      two_blocks ? multiply_pass<false, true>(in, first_pass, sums) : multiply_pass<false, false>(in, first_pass, sums);
    }
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
