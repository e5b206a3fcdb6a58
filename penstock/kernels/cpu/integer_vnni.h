// Sums of products in whole numbers with AVX-512's dot products of bytes. Included under such a target only.
#pragma once

#include <immintrin.h>

#include "integer_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

struct VnniEngine {
  static constexpr int kRowsAtOnce = 4;

  template <typename Meanwhile>
  static void sum(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t rows, const BytesAhead&,
                  IntegerSums* sums, const Meanwhile&) {
    for (int64_t r = 0; r < rows; r += rows - r < kRowsAtOnce ? 1 : kRowsAtOnce) {
      const bool single = rows - r < kRowsAtOnce;
      if (pair.panel[1] == nullptr) {
        single ? sum_rows<1, 1>(call, pair, row + r, r, sums) : sum_rows<1, kRowsAtOnce>(call, pair, row + r, r, sums);
      } else {
        single ? sum_rows<2, 1>(call, pair, row + r, r, sums) : sum_rows<2, kRowsAtOnce>(call, pair, row + r, r, sums);
      }
    }
  }

  static inline __m512i broadcast_quad(const uint8_t* from) {
    int32_t quad;
    memcpy(&quad, from, sizeof quad);
    return _mm512_set1_epi32(quad);
  }

  template <int kPanels, int kRows>
  static void sum_rows(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t block_row,
                       IntegerSums* sums) {
    __m512i sum[kPanels][2][kRows];
    for (int p = 0; p < kPanels; ++p) {
      const __m512i offsets = _mm512_loadu_si512(pair.panel[p]->offsets);
      for (int r = 0; r < kRows; ++r) sum[p][0][r] = offsets, sum[p][1][r] = _mm512_setzero_si512();
    }
    constexpr int64_t quads_per_tile = kIntegerTileInputs / kQuadInputs;
    const uint8_t* x = call.row_planes(row);
    for (int64_t quad = 0; quad < call.num_tiles * quads_per_tile; ++quad) {
      __m512i codes[kPanels];
      for (int p = 0; p < kPanels; ++p) codes[p] = _mm512_loadu_si512(pair.panel[p]->tiles + quad * kQuadBytes);
      const uint8_t* at = x + quad / quads_per_tile * kPlanesStep + quad % quads_per_tile * kQuadInputs;
      for (int r = 0; r < kRows; ++r) {
        const __m512i highs = broadcast_quad(at + r * kIntegerTileInputs);
        const __m512i lows = broadcast_quad(at + r * kIntegerTileInputs + kPlaneTileBytes);
        for (int p = 0; p < kPanels; ++p) {
          sum[p][0][r] = _mm512_dpbusd_epi32(sum[p][0][r], highs, codes[p]);
          sum[p][1][r] = _mm512_dpbusd_epi32(sum[p][1][r], lows, codes[p]);
        }
      }
    }
    for (int p = 0; p < kPanels; ++p)
      for (int plane = 0; plane < 2; ++plane)
        for (int r = 0; r < kRows; ++r) _mm512_store_si512(sums->of[p][plane][block_row + r], sum[p][plane][r]);
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
