// Matrix products in bfloat16 with AMX tiles, for any number of rows. Weights are the first operand, 16 outputs a
// tile, and activations the second, up to 16 rows a tile, so a product comes out with outputs down and rows across.
// Quantized tiles are unpacked to bfloat16 in a buffer that stays in the core's cache while all rows use it, 32 of
// them at a time. Each output element accumulates in float32 over the inputs in order, which is the same for one row
// and for many.
#include "kernels.h"
#include "target.h"

#if PENSTOCK_HAS_AMX

#include <immintrin.h>

PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma,amx-tile,amx-bf16")

#define PENSTOCK_ISA amx
#define PENSTOCK_REGISTER_BYTES 64
#define PENSTOCK_NATIVE_BF16
#include "amx.h"
#include "elementwise_impl.h"
#include "transpose.h"
#include "unpack_bf16.h"

namespace penstock {
namespace amx {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kItemRows = 2 * kBlockRows;
// Scales and offsets of one group in float16, and the codes.
constexpr int64_t kPlainInt4TileBytes = 2 * kPanelOutputs * 2 + kTileElements / 2;

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

// The passes over a strip, one for every 32 rows. The first pass reads the strip from memory and unpacks it; later
// passes read the unpacked tiles. An only pass needs each unpacked tile once.
enum class Pass { only, first, later };

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
constexpr int64_t kStepsAhead = 3;
// Steps in a buffer of unpacked tiles that are needed once; it should stay in the first-level cache.
constexpr int64_t kRingSteps = 4;
// The distance of prefetches. Strips are too short for the hardware prefetcher.
constexpr int64_t kPrefetchBytes = 4096;

static inline void prefetch_step(const Operands& in, int64_t step_bytes, int64_t t) {
  const int64_t strip_bytes = in.num_tiles * step_bytes;
  const int64_t at = t * step_bytes + kPrefetchBytes;
  const uint8_t* from = at < strip_bytes ? in.packed + at : in.next + (at - strip_bytes);
  for (int64_t line = 0; line < step_bytes; line += 64) _mm_prefetch(from + line, _MM_HINT_T0);
}

// Returns the part with fields that the compiler knows, for the most common format.
template <bool kPlainInt4>
static inline Part known_part(const Part& part) {
  Part known = part;
  if (kPlainInt4) {
    known.format = Format::int4;
    known.half_scales = known.has_offsets = true;
    known.groups_per_tile = 1;
    known.tile_bytes = kPlainInt4TileBytes;
  }
  return known;
}

static bool is_plain_int4(const Part& part) {
  return part.format == Format::int4 && part.half_scales && part.has_offsets && part.groups_per_tile == 1;
}

// Activations of many rows pass by while the strip stays in the first-level cache.
#define PENSTOCK_LOAD_ACTIVATIONS(tile, from, stride)    \
  if (kPass == Pass::only) {                             \
    _tile_loadd(tile, from, stride);                     \
  } else {                                               \
    _tile_stream_loadd(tile, from, stride);              \
  }

template <bool kTwoPanels, bool kTwoBlocks, Pass kPass, bool kPlainInt4>
static void multiply_block(const Operands& in, float* sums) {
  constexpr int64_t num_panels = kTwoPanels ? 2 : 1;
  constexpr int64_t step = num_panels * kBf16TileBytes;
  const Part part = known_part<kPlainInt4>(*in.part);
  const int64_t packed_step = num_panels * part.tile_bytes;
  const int64_t stride0 = in.rows[0] * 4, stride1 = in.rows[1] * 4;
  const bool unpack = kPass != Pass::later && (kPlainInt4 || in.unpacked != in.packed);
  const int64_t slots = kPass == Pass::only && unpack ? kRingSteps - 1 : -1;
  const auto fetch = [&](int64_t t) {
    prefetch_step(in, packed_step, t);
    for (int64_t p = 0; unpack && p < num_panels; ++p) {
      unpack_tile(part, in.packed + t * packed_step + p * part.tile_bytes,
                  in.unpacked + (t & slots) * step + p * kBf16TileBytes);
    }
  };
  _tile_zero(0);
  if (kTwoBlocks) _tile_zero(1);
  if (kTwoPanels) _tile_zero(2);
  if (kTwoPanels && kTwoBlocks) _tile_zero(3);
  for (int64_t t = 0; kPass != Pass::later && t < kStepsAhead && t < in.num_tiles; ++t) fetch(t);
  for (int64_t t = 0; t < in.num_tiles; ++t) {
    if (kPass != Pass::later && t + kStepsAhead < in.num_tiles) fetch(t + kStepsAhead);
    const uint8_t* weights = in.unpacked + (t & slots) * step;
    PENSTOCK_LOAD_ACTIVATIONS(6, in.x[0] + t * kTileInputs * in.rows[0], stride0)
    _tile_loadd(4, weights, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoPanels) {
      _tile_loadd(5, weights + kBf16TileBytes, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (kTwoBlocks) {
      PENSTOCK_LOAD_ACTIVATIONS(7, in.x[1] + t * kTileInputs * in.rows[1], stride1)
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

#undef PENSTOCK_LOAD_ACTIVATIONS

template <bool kTwoPanels, bool kTwoBlocks>
static void multiply_pass(const Operands& in, Pass pass, float* sums) {
  if (pass == Pass::later) return multiply_block<kTwoPanels, kTwoBlocks, Pass::later, false>(in, sums);
  const bool plain = is_plain_int4(*in.part);
  if (pass == Pass::first) {
    return plain ? multiply_block<kTwoPanels, kTwoBlocks, Pass::first, true>(in, sums)
                 : multiply_block<kTwoPanels, kTwoBlocks, Pass::first, false>(in, sums);
  }
  return plain ? multiply_block<kTwoPanels, kTwoBlocks, Pass::only, true>(in, sums)
               : multiply_block<kTwoPanels, kTwoBlocks, Pass::only, false>(in, sums);
}

// The rows of an accumulator, [16 outputs][rows] → [rows][16 outputs].
static inline void turn_tile(const float* sums, int64_t num_rows, __m512i* rows) {
  const __mmask16 mask = static_cast<__mmask16>((1u << num_rows) - 1);
  for (int o = 0; o < 16; ++o) rows[o] = _mm512_maskz_loadu_epi32(mask, sums + o * num_rows);
  transpose_16x16(rows);
}

// One block of rows of a strip's accumulators to where they belong.
static void write_block(const LinearCall& call, const Strip& strip, int64_t row, int64_t num_rows,
                        const float* sums) {
  const float* second = sums + 2 * 256;
  const bool two_panels = strip.num_panels == 2;
  if (num_rows == 1) {
    const __m512 high = two_panels ? _mm512_load_ps(second) : _mm512_setzero_ps();
    return write_strip_row(call, row, strip.first_output, strip.num_outputs, _mm512_load_ps(sums), high);
  }
  __m512i low[16], high[16] = {};
  turn_tile(sums, num_rows, low);
  if (two_panels) turn_tile(second, num_rows, high);
  for (int64_t r = 0; r < num_rows; ++r) {
    write_strip_row(call, row + r, strip.first_output, strip.num_outputs, _mm512_castsi512_ps(low[r]),
                    _mm512_castsi512_ps(high[r]));
  }
}

static Operands strip_operands(const LinearCall& call, const Strip& strip, const Strip& next) {
  static thread_local Scratch scratch;
  Operands in = {};
  in.part = call.parts + strip.part;
  in.num_tiles = call.num_tiles;
  in.packed = strip.data;
  in.next = next.data;
  in.unpacked = in.part->format == Format::bfloat16
                    ? const_cast<uint8_t*>(strip.data)
                    : scratch.get<uint8_t>(kStripPanels * call.num_tiles * kBf16TileBytes);
  return in;
}

// write(row, number of rows, sums) for every 16 rows; the sums of a second panel lie behind two tiles.
template <typename Write>
static void run_strip(const LinearCall& call, const Strip& strip, const Strip& next, int64_t first_row,
                      int64_t end_row, const Write& write) {
  alignas(64) float sums[4 * 256];
  Operands in = strip_operands(call, strip, next);
  const bool one_pass = end_row - first_row <= kItemRows;
  for (int64_t row = first_row; row < end_row; row += kItemRows) {
    const int64_t left = end_row - row;
    in.rows[0] = left < kBlockRows ? left : kBlockRows;
    in.rows[1] = left - in.rows[0] < kBlockRows ? left - in.rows[0] : kBlockRows;
    const bool two_blocks = in.rows[1] > 0;
    const Pass pass = one_pass ? Pass::only : row == first_row ? Pass::first : Pass::later;
    for (int b = 0; b < 2; ++b) {
      in.x[b] = static_cast<const bf16*>(call.x) + (row + b * kBlockRows) * call.num_tiles * kTileInputs;
    }
    use_tiles(linear_shapes(in.rows[0], two_blocks ? in.rows[1] : 1));
    if (strip.num_panels == 2) {
      two_blocks ? multiply_pass<true, true>(in, pass, sums) : multiply_pass<true, false>(in, pass, sums);
    } else {
      two_blocks ? multiply_pass<false, true>(in, pass, sums) : multiply_pass<false, false>(in, pass, sums);
    }
    write(row, in.rows[0], sums);
    if (two_blocks) write(row + kBlockRows, in.rows[1], sums + 256);
  }
}

void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  const Strip* next = &strip + call.strips_at_once;
  if (next >= call.strips + call.num_strips) next = &strip;
  run_strip(call, strip, *next, first_row, end_row, [&](int64_t row, int64_t num_rows, const float* sums) {
    write_block(call, strip, row, num_rows, sums);
  });
}

// Two outputs of a panel for up to 16 rows, rounded to bfloat16: the first in the lower half.
static inline __m512i round_outputs(const float* sums, int64_t output, int64_t num_rows) {
  const __mmask16 mask = static_cast<__mmask16>((1u << num_rows) - 1);
  const float* panel = sums + output / kPanelOutputs * 2 * 256;
  const float* from = panel + output % kPanelOutputs * num_rows;
  return unpack::narrow(_mm512_maskz_loadu_ps(mask, from), _mm512_maskz_loadu_ps(mask, from + num_rows));
}

static inline __m512 gate_rows(Activation activation, __m256i gate, __m256i up) {
  Floats value;
  value.part[0] = (FloatRegister)widen_bf16(gate);
  return _mm512_mul_ps((__m512)activate_roughly(activation, value).part[0], widen_bf16(up));
}

// Keeps the rounded results of the gate strip until the results of the up strip are there. The next product reads
// activations in the same order, outputs by rows, except that it reads neighbouring outputs in pairs.
void multiply_gated(const LinearCall& call, const Strip& gate, const Strip& up, Activation activation,
                    int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  constexpr int64_t outputs = kStripPanels * kPanelOutputs;
  bf16* waiting = scratch.get<bf16>(round_up(end_row - first_row, kBlockRows) * outputs);
  run_strip(call, gate, up, first_row, end_row, [&](int64_t row, int64_t num_rows, const float* sums) {
    for (int64_t o = 0; o < outputs; o += 2) {
      _mm512_store_si512(waiting + (row - first_row) * outputs + o * kBlockRows, round_outputs(sums, o, num_rows));
    }
  });
  const Strip* next = &gate + call.strips_at_once;
  if (next >= call.strips + call.num_strips || next->part != gate.part) next = &gate;
  const __m512i pairing = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                           6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  run_strip(call, up, *next, first_row, end_row, [&](int64_t row, int64_t num_rows, const float* sums) {
    const int64_t width = call.out_features / 2;
    const __mmask16 mask = static_cast<__mmask16>((1u << num_rows) - 1);
    bf16* to = static_cast<bf16*>(call.y) + row * width + gate.first_output * num_rows;
    for (int64_t o = 0; o < outputs; o += 2) {
      const __m512i gates = _mm512_load_si512(waiting + (row - first_row) * outputs + o * kBlockRows);
      const __m512i ups = round_outputs(sums, o, num_rows);
      const __m512 first =
          gate_rows(activation, _mm512_castsi512_si256(gates), _mm512_castsi512_si256(ups));
      const __m512 second =
          gate_rows(activation, _mm512_extracti64x4_epi64(gates, 1), _mm512_extracti64x4_epi64(ups, 1));
      const __m512i pairs = _mm512_permutexvar_epi16(pairing, unpack::narrow(first, second));
      _mm512_mask_storeu_epi32(to + o * num_rows, mask, pairs);
    }
  });
}

}  // namespace amx
}  // namespace penstock

PENSTOCK_TARGET_END

#endif
