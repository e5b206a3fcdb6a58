// Sums of products in whole numbers with AVX-512's dot products of bytes. Included under such a target only.
#pragma once

#include <immintrin.h>

#include "integer_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

struct VnniEngine {
  static constexpr int kVectorRows = 4;

  template <typename Meanwhile>
  static void sum(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t rows, const BytesAhead&,
                  IntegerSums* sums, const Meanwhile&) {
    for (int64_t r = 0; r < rows; r += rows - r < kVectorRows ? 1 : kVectorRows) {
      const bool single = rows - r < kVectorRows;
      if (pair.panel[1] == nullptr) {
        single ? sum_rows<1, 1>(call, pair, row + r, r, sums) : sum_rows<1, kVectorRows>(call, pair, row + r, r, sums);
      } else {
        single ? sum_rows<2, 1>(call, pair, row + r, r, sums) : sum_rows<2, kVectorRows>(call, pair, row + r, r, sums);
      }
    }
  }

  static inline __m512i broadcast_quad(const uint8_t* from) {
    int32_t quad;
    memcpy(&quad, from, sizeof quad);
    return _mm512_set1_epi32(quad);
  }

  template <int kPanels, int kRows>
  static void sum_rows(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t index,
                       IntegerSums* sums) {
    __m512i sum[kPanels][kRows];
    for (int p = 0; p < kPanels; ++p) {
      for (int r = 0; r < kRows; ++r) sum[p][r] = _mm512_loadu_si512(pair.panel[p]->offsets);
    }
    const uint8_t* x = call.row_codes(row);
    constexpr int64_t quads_per_tile = kIntegerTileInputs / kQuadInputs;
    for (int64_t quad = 0; quad < call.num_tiles * quads_per_tile; ++quad) {
      const int64_t at = quad / quads_per_tile * kCodesTileBytes + quad % quads_per_tile * kQuadInputs;
      __m512i codes[kPanels];
      for (int p = 0; p < kPanels; ++p) codes[p] = _mm512_loadu_si512(pair.panel[p]->tiles + quad * kQuadBytes);
      for (int r = 0; r < kRows; ++r) {
        const __m512i inputs = broadcast_quad(x + at + r * kIntegerTileInputs);
        for (int p = 0; p < kPanels; ++p) sum[p][r] = _mm512_dpbusd_epi32(sum[p][r], inputs, codes[p]);
      }
    }
    for (int p = 0; p < kPanels; ++p)
      for (int r = 0; r < kRows; ++r) _mm512_store_si512(sums->of[p][index + r], sum[p][r]);
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
