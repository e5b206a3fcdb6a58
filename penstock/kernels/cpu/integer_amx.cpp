// Products in whole numbers with AMX tiles. Rows of activations are the first operand and weights the second, both as
// they lie in memory, so that sums come out with rows down and outputs across.
#include "kernels.h"
#include "target.h"

#if PENSTOCK_HAS_AMX

#include <immintrin.h>

PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma,amx-tile,amx-int8")

#define PENSTOCK_ISA amx
#define PENSTOCK_REGISTER_BYTES 64
#define PENSTOCK_NATIVE_BF16
#include "amx.h"
#include "integer_impl.h"

namespace penstock {
namespace amx {

constexpr int64_t kTilesAhead = 4;
constexpr int64_t kQuadsPerTile = kIntegerTileInputs / kQuadInputs;

// Tiles 0 to 3 accumulate (block of rows, panel), 4 and 5 hold weights, 6 and 7 the codes of the two blocks.
struct IntegerTiles {
  static TileShapes shapes(int64_t rows) {
    const int64_t in_first = rows < kIntegerBlockRows ? rows : kIntegerBlockRows;
    const int64_t in_second = rows > in_first ? rows - in_first : in_first;  // unused where there is none
    TileShapes made;
    made.set(0, in_first, 64);
    made.set(1, in_first, 64);
    made.set(2, in_second, 64);
    made.set(3, in_second, 64);
    made.set(4, kQuadsPerTile, 64);
    made.set(5, kQuadsPerTile, 64);
    made.set(6, in_first, 64);
    made.set(7, in_second, 64);
    return made;
  }

  // Panels are too short for the processor to find out by itself what comes after them. A single turn asks for what it
  // needs in a moment; one of several for its share of the next panel.
  template <bool kSingleTurn>
  static inline void fetch(const uint8_t* tiles, const uint8_t* next, int64_t num_tiles, int64_t tile,
                           const BytesAhead& ahead) {
    if (kSingleTurn) {
      const int64_t at = tile + kTilesAhead;
      const uint8_t* from =
          at < num_tiles ? tiles + at * kIntegerTileBytes : next + (at - num_tiles) * kIntegerTileBytes;
      for (int64_t line = 0; line < kIntegerTileBytes; line += 64) _mm_prefetch(from + line, _MM_HINT_T0);
    } else {
      const uint8_t* from = next + tile * kIntegerTileBytes;
      for (int64_t line = ahead.first; line < ahead.end; line += 64) _mm_prefetch(from + line, _MM_HINT_T1);
    }
  }

  // All loads of a step come before its products: where another program has the core's other half, neither overlaps with
  // the other, and a change from one to the other costs time.
  template <bool kTwoBlocks, bool kTwoPanels, bool kSingleTurn, typename Meanwhile>
  static inline void sum_tiles(const IntegerCall& call, const PanelPair& pair, int64_t row, const BytesAhead& ahead,
                               IntegerSums* sums, const Meanwhile& meanwhile) {
    const uint8_t* x = call.row_codes(row);
    const uint8_t* more = kTwoBlocks ? call.row_codes(row + kIntegerBlockRows) : nullptr;
    const uint8_t* first = pair.panel[0]->tiles;
    const uint8_t* second = kTwoPanels ? pair.panel[1]->tiles : nullptr;
    _tile_loadd(0, pair.panel[0]->offsets, 0);  // the same for every row
    if (kTwoPanels) _tile_loadd(1, pair.panel[1]->offsets, 0);
    if (kTwoBlocks) _tile_loadd(2, pair.panel[0]->offsets, 0);
    if (kTwoBlocks && kTwoPanels) _tile_loadd(3, pair.panel[1]->offsets, 0);
    for (int64_t t = 0; t < call.num_tiles; ++t) {
      fetch<kSingleTurn>(first, pair.next[0], call.num_tiles, t, ahead);
      if (kTwoPanels) fetch<kSingleTurn>(second, pair.next[1], call.num_tiles, t, ahead);
      _tile_stream_loadd(6, x + t * kCodesTileBytes, 64);
      _tile_loadd(4, first + t * kIntegerTileBytes, 64);
      if (kTwoBlocks) _tile_stream_loadd(7, more + t * kCodesTileBytes, 64);
      if (kTwoPanels) _tile_loadd(5, second + t * kIntegerTileBytes, 64);
      _tile_dpbusd(0, 6, 4);
      if (kTwoBlocks) _tile_dpbusd(2, 7, 4);
      if (kTwoPanels) _tile_dpbusd(1, 6, 5);
      if (kTwoBlocks && kTwoPanels) _tile_dpbusd(3, 7, 5);
      meanwhile();
    }
    _tile_stored(0, sums->of[0][0], 64);
    if (kTwoPanels) _tile_stored(1, sums->of[1][0], 64);
    if (kTwoBlocks) _tile_stored(2, sums->of[0][kIntegerBlockRows], 64);
    if (kTwoBlocks && kTwoPanels) _tile_stored(3, sums->of[1][kIntegerBlockRows], 64);
  }

  template <bool kTwoBlocks, typename Meanwhile>
  static inline void sum_blocks(const IntegerCall& call, const PanelPair& pair, int64_t row, const BytesAhead& ahead,
                                IntegerSums* sums, const Meanwhile& meanwhile) {
    if (pair.panel[1] == nullptr) {
      return sum_tiles<kTwoBlocks, false, false>(call, pair, row, ahead, sums, meanwhile);
    }
    if (ahead.is_all()) return sum_tiles<kTwoBlocks, true, true>(call, pair, row, ahead, sums, meanwhile);
    return sum_tiles<kTwoBlocks, true, false>(call, pair, row, ahead, sums, meanwhile);
  }

  template <typename Meanwhile>
  static inline void sum(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t rows,
                         const BytesAhead& ahead, IntegerSums* sums, const Meanwhile& meanwhile) {
    use_tiles(shapes(rows));
    if (rows > kIntegerBlockRows) return sum_blocks<true>(call, pair, row, ahead, sums, meanwhile);
    return sum_blocks<false>(call, pair, row, ahead, sums, meanwhile);
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
