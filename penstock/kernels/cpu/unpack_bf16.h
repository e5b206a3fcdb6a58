// Packed tiles → bfloat16 tiles, with AVX-512 and its bfloat16 conversions. Included under such a target only.
#pragma once

#include <immintrin.h>

#include "linear.h"

namespace penstock {

constexpr int64_t kBf16TileBytes = kTileElements * 2;

namespace unpack {

// Scales or offsets of 16 outputs, each repeated for the two inputs of a pair.
struct Doubled {
  __m512 low;   // outputs 0 to 7
  __m512 high;  // outputs 8 to 15
};

static inline Doubled load_doubled(const uint8_t* table, bool half, int64_t group) {
  const __m512 values = half ? _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table) + group))
                             : _mm512_loadu_ps(reinterpret_cast<const float*>(table) + group * kPanelOutputs);
  const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  return {_mm512_permutexvar_ps(first, values), _mm512_permutexvar_ps(second, values)};
}

static inline void store_pair(uint8_t* to, __m512 low, __m512 high) {
  _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <Format kFormat>
static inline void unpack_tile(const Part& part, const uint8_t* tile, uint8_t* to) {
  const uint8_t* codes = tile + part.codes_at();
  const __m512 code_values = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int half = 0; half < 2; ++half) {
    const int64_t group = half * part.groups_per_tile / 2;
    const Doubled scale = load_doubled(tile, part.half_scales, group);
    Doubled offset = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (part.has_offsets) offset = load_doubled(tile + part.table_bytes(), part.half_scales, group);
    if (kFormat == Format::int4) {
      __m512i left = _mm512_loadu_si512(codes + half * 128), right = _mm512_loadu_si512(codes + half * 128 + 64);
      for (int j = 0; j < 8; ++j) {
        const __m512 low = _mm512_permutexvar_ps(_mm512_srli_epi32(left, 4 * j), code_values);
        const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(right, 4 * j), code_values);
        store_pair(to + (half * 8 + j) * 64, _mm512_fmadd_ps(low, scale.low, offset.low),
                   _mm512_fmadd_ps(high, scale.high, offset.high));
      }
    } else {
      for (int j = 0; j < 8; ++j) {
        const __m128i* from = reinterpret_cast<const __m128i*>(codes + (half * 8 + j) * 32);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
        store_pair(to + (half * 8 + j) * 64, _mm512_fmadd_ps(low, scale.low, offset.low),
                   _mm512_fmadd_ps(high, scale.high, offset.high));
      }
    }
  }
}

}  // namespace unpack

// Leaves in `panels` where the strip's bfloat16 tiles are: in place, or unpacked into `scratch`.
static inline void unpack_strip(const LinearCall& call, const Strip& strip, Scratch& scratch, const uint8_t** panels) {
  const Part& part = call.parts[strip.part];
  const int64_t panel_bytes = call.num_tiles * kBf16TileBytes;
  uint8_t* unpacked = part.format == Format::bfloat16 ? nullptr : scratch.get<uint8_t>(kStripPanels * panel_bytes);
  for (int32_t p = 0; p < strip.num_panels; ++p) {
    const uint8_t* tiles = part.panel(strip.first_panel + p);
    panels[p] = unpacked == nullptr ? tiles : unpacked + p * panel_bytes;
    if (unpacked == nullptr) continue;
    for (int64_t t = 0; t < call.num_tiles; ++t) {
      uint8_t* to = unpacked + p * panel_bytes + t * kBf16TileBytes;
      if (part.format == Format::int4) {
        unpack::unpack_tile<Format::int4>(part, tiles + t * part.tile_bytes, to);
      } else {
        unpack::unpack_tile<Format::int8>(part, tiles + t * part.tile_bytes, to);
      }
    }
  }
}

// Sums of one row, 32 floats, plus bias → the strip's outputs of that row.
static inline void write_strip_row(const LinearCall& call, const Strip& strip, int64_t row, const float* sums) {
  const int64_t at = row * call.out_features + strip.first_output;
  for (int64_t done = 0; done < strip.num_outputs; done += 16) {
    const int64_t left = strip.num_outputs - done;
    const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    __m512 sum = _mm512_load_ps(sums + done);
    if (call.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_loadu_ps(call.bias + strip.first_output + done));
    if (call.y_dtype == Dtype::float32) {
      _mm512_mask_storeu_ps(static_cast<float*>(call.y) + at + done, mask, sum);
    } else {
      _mm256_mask_storeu_epi16(static_cast<bf16*>(call.y) + at + done, mask, (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

}  // namespace penstock
