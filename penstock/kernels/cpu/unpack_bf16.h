// Packed tiles → bfloat16 tiles, with AVX-512 and its bfloat16 conversions. Included under such a target only.
#pragma once

#include <immintrin.h>

#include "linear.h"

namespace penstock {

constexpr int64_t kBf16TileBytes = kTileElements * 2;

namespace unpack {

// Scales and offsets of one group of 16 outputs, in memory so that one can be broadcast by a load.
struct alignas(64) GroupTable {
  float scale[kPanelOutputs];
  float offset[kPanelOutputs];
};

static inline __m512 load_row(const uint8_t* table, bool half, int64_t group) {
  return half ? _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table) + group))
              : _mm512_loadu_ps(reinterpret_cast<const float*>(table) + group * kPanelOutputs);
}

static inline void load_tables(const Part& part, const uint8_t* tile, GroupTable* tables) {
  for (int32_t group = 0; group < part.groups_per_tile; ++group) {
    _mm512_store_ps(tables[group].scale, load_row(tile, part.half_scales, group));
    const __m512 offset = part.has_offsets ? load_row(tile + part.table_bytes(), part.half_scales, group)
                                           : _mm512_setzero_ps();
    _mm512_store_ps(tables[group].offset, offset);
  }
}

static inline __m512i narrow(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Returns the values of the 16 codes in one group of one output.
static inline __m512 code_values(const GroupTable& table, int output) {
  const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_fmadd_ps(codes, _mm512_set1_ps(table.scale[output]), _mm512_set1_ps(table.offset[output]));
}

// Groups of 32: a table of 32 values holds two outputs, selected by bit 4 of the index. The code in the highest bits
// needs no mask when its bit 4 is clear.
static inline void unpack_int4_group32(const uint8_t* codes, const GroupTable& table, uint8_t* to) {
  const __m512i code_bits = _mm512_set1_epi16(15), second_table = _mm512_set1_epi16(16);
  constexpr int and_mask = 0xc0, and_mask_or = 0xea;
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    const __m512i words = _mm512_loadu_si512(codes + quad * 64);
    const int output = quad * 4;
    const __m512i outer = narrow(code_values(table, output + 3), code_values(table, output));
    const __m512i inner = narrow(code_values(table, output + 1), code_values(table, output + 2));
    const __m512i index0 = _mm512_ternarylogic_epi32(words, code_bits, second_table, and_mask_or);
    const __m512i shifted1 = _mm512_srli_epi16(words, 4), shifted2 = _mm512_srli_epi16(words, 8);
    const __m512i index1 = _mm512_ternarylogic_epi32(shifted1, code_bits, second_table, and_mask);
    const __m512i index2 = _mm512_ternarylogic_epi32(shifted2, code_bits, second_table, and_mask_or);
    const __m512i index3 = _mm512_srli_epi16(words, 12);
    uint8_t* rows = to + output * 64;
    _mm512_store_si512(rows, _mm512_permutexvar_epi16(index0, outer));
    _mm512_store_si512(rows + 64, _mm512_permutexvar_epi16(index1, inner));
    _mm512_store_si512(rows + 128, _mm512_permutexvar_epi16(index2, inner));
    _mm512_store_si512(rows + 192, _mm512_permutexvar_epi16(index3, outer));
  }
}

// Groups of 16: a table of 32 values holds both groups of one output; bit 4 of the index is the input's.
static inline void unpack_int4_group16(const uint8_t* codes, const GroupTable* tables, uint8_t* to) {
  const __m512i code_bits = _mm512_set1_epi16(15);
  const __m512i group_bit = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  for (int output = 0; output < kPanelOutputs; ++output) {
    const __m512i words = _mm512_loadu_si512(codes + output / 4 * 64);
    const __m512i values = narrow(code_values(tables[0], output), code_values(tables[1], output));
    const __m512i shifted = _mm512_srl_epi16(words, _mm_cvtsi32_si128(output % 4 * 4));
    const __m512i index = _mm512_ternarylogic_epi32(shifted, code_bits, group_bit, 0xea);
    _mm512_store_si512(to + output * 64, _mm512_permutexvar_epi16(index, values));
  }
}

static inline void unpack_int8(const uint8_t* codes, const GroupTable& low, const GroupTable& high, uint8_t* to) {
#pragma GCC unroll 4
  for (int output = 0; output < kPanelOutputs; ++output) {
    const __m128i* from = reinterpret_cast<const __m128i*>(codes + output * kTileInputs);
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
    const __m512i row =
        narrow(_mm512_fmadd_ps(first, _mm512_set1_ps(low.scale[output]), _mm512_set1_ps(low.offset[output])),
               _mm512_fmadd_ps(second, _mm512_set1_ps(high.scale[output]), _mm512_set1_ps(high.offset[output])));
    _mm512_store_si512(to + output * 64, row);
  }
}

}  // namespace unpack

static inline void unpack_tile(const Part& part, const uint8_t* tile, uint8_t* to) {
  unpack::GroupTable tables[2];
  unpack::load_tables(part, tile, tables);
  const uint8_t* codes = tile + part.codes_at();
  const unpack::GroupTable& last = tables[part.groups_per_tile - 1];
  if (part.format == Format::int8) {
    unpack::unpack_int8(codes, tables[0], last, to);
  } else if (part.groups_per_tile == 1) {
    unpack::unpack_int4_group32(codes, tables[0], to);
  } else {
    unpack::unpack_int4_group16(codes, tables, to);
  }
}

static inline __m512 widen_bf16(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

// Rows of a strip's 32 outputs, of which `count` are there: plus bias, to where they belong.
static inline void write_strip_row(const LinearCall& call, int64_t row, int64_t output, int64_t count, __m512 low,
                                   __m512 high) {
  const int64_t at = row * call.out_features + output;
  const __mmask32 mask = count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  const __mmask16 low_mask = static_cast<__mmask16>(mask), high_mask = static_cast<__mmask16>(mask >> 16);
  if (call.bias != nullptr) {
    low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(low_mask, call.bias + output));
    high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(high_mask, call.bias + output + kPanelOutputs));
  }
  if (call.y_dtype == Dtype::float32) {
    float* to = static_cast<float*>(call.y) + at;
    if (call.adds) {
      low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(low_mask, to));
      high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(high_mask, to + kPanelOutputs));
    }
    _mm512_mask_storeu_ps(to, low_mask, low);
    return _mm512_mask_storeu_ps(to + kPanelOutputs, high_mask, high);
  }
  bf16* to = static_cast<bf16*>(call.y) + at;
  __m512i rounded = unpack::narrow(low, high);
  if (call.adds) {
    const __m512i old = _mm512_maskz_loadu_epi16(mask, to);
    low = _mm512_add_ps(widen_bf16(_mm512_castsi512_si256(old)), widen_bf16(_mm512_castsi512_si256(rounded)));
    high = _mm512_add_ps(widen_bf16(_mm512_extracti64x4_epi64(old, 1)),
                         widen_bf16(_mm512_extracti64x4_epi64(rounded, 1)));
    rounded = unpack::narrow(low, high);
  }
  _mm512_mask_storeu_epi16(to, mask, rounded);
}

}  // namespace penstock
