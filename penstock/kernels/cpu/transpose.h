// Included under an AVX-512 target only.
#pragma once

#include <immintrin.h>

namespace penstock {

// Sixteen vectors of sixteen 32-bit lanes, in place.
static inline void transpose_16x16(__m512i* rows) {
  __m512i pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(quads[i], quads[i + 4], 0xdd);
    const __m512i high = _mm512_shuffle_i32x4(quads[i + 8], quads[i + 12], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(quads[i + 8], quads[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(low, high, 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

}  // namespace penstock
