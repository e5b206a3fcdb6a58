// Products in whole numbers with AMX tiles. Rows of activations are the first operand and weights the second, both as
// they lie in memory, so that sums come out with rows down and outputs across.
#include "kernels.h"
#include "target.h"

#if PENSTOCK_HAS_AMX

#include <immintrin.h>

PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,f16c,fma,amx-tile,amx-int8")

#define PENSTOCK_ISA amx
#define PENSTOCK_REGISTER_BYTES 64
#define PENSTOCK_NATIVE_BF16
#include "amx.h"
#include "integer_impl.h"

namespace penstock {
namespace amx {

// As `split_row`, 64 inputs at a time: even and odd inputs are made codes apart, joined again as 16 bits each, and
// their bytes sorted by one permutation for each plane. Needs VBMI, which a virtual machine may hide.
void split_row_by_bytes(const IntegerCall& call, const bf16* x, int64_t width, int64_t row) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff), odd = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const auto load_words = [&](int64_t at) {
    const int64_t left = width - at;
    const __mmask32 mask = left >= 32 ? ~__mmask32{0} : left > 0 ? (__mmask32{1} << left) - 1 : 0;
    return _mm512_maskz_loadu_epi16(mask, x + at);
  };
  __m512i largest_words = _mm512_setzero_si512();
  for (int64_t i = 0; i < width; i += 32) {
    largest_words = _mm512_max_epu16(largest_words, _mm512_and_si512(load_words(i), magnitude));
  }
  const __m512i in_even = _mm512_slli_epi32(largest_words, 16), in_odd = _mm512_and_si512(largest_words, odd);
  const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(in_even, in_odd));
  float largest;
  memcpy(&largest, &bits, sizeof largest);
  call.row_scales[row] = largest / kLargestCode;
  const __m512 inverse = _mm512_set1_ps(largest > 0 ? kLargestCode / largest : 0.0f);
  const __m512 rounder = _mm512_set1_ps(kSplitRounder);
  const auto code = [&](__m512i values) {
    return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(values), inverse, rounder));
  };
  const auto codes = [&](__m512i words) {
    const __m512i evens = code(_mm512_slli_epi32(words, 16)), odds = code(_mm512_and_si512(words, odd));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, evens, _mm512_slli_epi32(odds, 16));
  };
  alignas(64) uint8_t low_bytes[64];
  for (int i = 0; i < 64; ++i) low_bytes[i] = static_cast<uint8_t>(2 * i);
  const __m512i lows = _mm512_load_si512(low_bytes), highs = _mm512_add_epi8(lows, _mm512_set1_epi8(1));
  uint8_t* to = call.row_planes(row);
  for (int64_t i = 0; i < width; i += kIntegerTileInputs, to += kPlanesStep) {
    const __m512i first = codes(load_words(i)), second = codes(load_words(i + 32));
    _mm512_store_si512(to, _mm512_permutex2var_epi8(first, highs, second));
    _mm512_store_si512(to + kPlaneTileBytes, _mm512_permutex2var_epi8(first, lows, second));
  }
}

constexpr int64_t kTilesAhead = 4;

// Tiles 0 to 3 accumulate (panel, plane), 4 and 5 hold weights, 6 and 7 the planes.
struct IntegerTiles {
  static TileShapes shapes(int64_t rows) {
    TileShapes made;
    for (int accumulator = 0; accumulator < 4; ++accumulator) made.set(accumulator, rows, 64);
    made.set(4, 16, 64);
    made.set(5, 16, 64);
    made.set(6, rows, 64);
    made.set(7, rows, 64);
    return made;
  }

  // Panels are too short for the processor to find out by itself what comes after them. A single block asks for what it
  // needs in a moment; one of several for its share of the next panel.
  template <bool kSingleBlock>
  static inline void fetch(const uint8_t* tiles, const uint8_t* next, int64_t num_tiles, int64_t tile,
                           const BytesAhead& ahead) {
    if (kSingleBlock) {
      const int64_t at = tile + kTilesAhead;
      const uint8_t* from =
          at < num_tiles ? tiles + at * kIntegerTileBytes : next + (at - num_tiles) * kIntegerTileBytes;
      for (int64_t line = 0; line < kIntegerTileBytes; line += 64) _mm_prefetch(from + line, _MM_HINT_T0);
    } else {
      const uint8_t* from = next + tile * kIntegerTileBytes;
      for (int64_t line = ahead.first; line < ahead.end; line += 64) _mm_prefetch(from + line, _MM_HINT_T1);
    }
  }

  template <bool kTwoPanels, bool kSingleBlock, typename Meanwhile>
  static inline void sum_tiles(const IntegerCall& call, const PanelPair& pair, int64_t row, const BytesAhead& ahead,
                               IntegerSums* sums, const Meanwhile& meanwhile) {
    const uint8_t* planes = call.row_planes(row);
    const uint8_t* first = pair.panel[0]->tiles;
    const uint8_t* second = kTwoPanels ? pair.panel[1]->tiles : nullptr;
    _tile_loadd(0, pair.panel[0]->offsets, 0);  // the same for every row
    _tile_zero(1);
    if (kTwoPanels) _tile_loadd(2, pair.panel[1]->offsets, 0);
    if (kTwoPanels) _tile_zero(3);
    for (int64_t t = 0; t < call.num_tiles; ++t) {
      fetch<kSingleBlock>(first, pair.next[0], call.num_tiles, t, ahead);
      _tile_stream_loadd(6, planes + t * kPlanesStep, 64);
      _tile_loadd(4, first + t * kIntegerTileBytes, 64);
      _tile_dpbusd(0, 6, 4);
      _tile_stream_loadd(7, planes + t * kPlanesStep + kPlaneTileBytes, 64);
      _tile_dpbusd(1, 7, 4);
      if (kTwoPanels) {
        fetch<kSingleBlock>(second, pair.next[1], call.num_tiles, t, ahead);
        _tile_loadd(5, second + t * kIntegerTileBytes, 64);
        _tile_dpbusd(2, 6, 5);
        _tile_dpbusd(3, 7, 5);
      }
      meanwhile();
    }
    _tile_stored(0, sums->of[0][0], 64);
    _tile_stored(1, sums->of[0][1], 64);
    if (kTwoPanels) _tile_stored(2, sums->of[1][0], 64);
    if (kTwoPanels) _tile_stored(3, sums->of[1][1], 64);
  }

  template <typename Meanwhile>
  static inline void sum(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t rows,
                         const BytesAhead& ahead, IntegerSums* sums, const Meanwhile& meanwhile) {
    use_tiles(shapes(rows));
    if (pair.panel[1] == nullptr) return sum_tiles<false, false>(call, pair, row, ahead, sums, meanwhile);
    if (ahead.is_all()) return sum_tiles<true, true>(call, pair, row, ahead, sums, meanwhile);
    return sum_tiles<true, false>(call, pair, row, ahead, sums, meanwhile);
  }
};

void multiply_panels(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs, int64_t first_row,
                     int64_t end_row) {
  multiply_panels_with<IntegerTiles>(call, pairs, num_pairs, first_row, end_row);
}

void multiply_gated_panels(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs, Activation activation,
                           int64_t first_row, int64_t end_row) {
  multiply_gated_panels_with<IntegerTiles>(call, pairs, num_pairs, activation, first_row, end_row);
}

}  // namespace amx
}  // namespace penstock

PENSTOCK_TARGET_END

#endif
