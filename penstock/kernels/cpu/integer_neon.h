// Scaled sums of products in whole numbers with ARM's dot products of bytes. Included under such a target only.
#pragma once

#include <arm_neon.h>

#include "integer_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

struct NeonEngine {
  static constexpr int kVectorOutputs = 4;
  // The bits of kCodeRounder, 1.5 * 2^23. The sums of a tile are below 2^22. A sum that starts from these bits is the float
  // kCodeRounder + sum, so a subtraction replaces the conversion, which takes as long as four products.
  static constexpr int32_t kZeroBits = 0x4b400000;

  template <CodeKind kKind, int kGroups>
  static void multiply(const IntegerCall& call, const Part& part, const uint8_t* tiles, const PanelCodes& codes,
                       int64_t row, int64_t rows, float* sums) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      block<kKind, kGroups, 4, 2>(call, part, tiles, codes, row + r, 0, sums + r * kPanelOutputs);
      block<kKind, kGroups, 4, 2>(call, part, tiles, codes, row + r, 2, sums + r * kPanelOutputs);
    }
    if (r + 2 <= rows) {
      block<kKind, kGroups, 2, 4>(call, part, tiles, codes, row + r, 0, sums + r * kPanelOutputs);
      r += 2;
    }
    if (r < rows) block<kKind, kGroups, 1, 4>(call, part, tiles, codes, row + r, 0, sums + r * kPanelOutputs);
  }

  PENSTOCK_INLINE float32x4_t load_factor(const Part& part, const uint8_t* table, int64_t at) {
    return part.half_scales
               ? vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(table) + at)))
               : vld1q_f32(reinterpret_cast<const float*>(table) + at);
  }

  // sum[r][v] += quad `kQuad` of 16 codes (4 outputs) × the same quad of a row.
  template <int kQuad, int kRows, int kVectors>
  PENSTOCK_INLINE void dot(int32x4_t (&sum)[kRows][kVectors], const int8x16_t (&weights)[kVectors],
                                         const int8x16_t (&x)[kRows]) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = vdotq_laneq_s32(sum[r][v], weights[v], x[r], kQuad);
    }
  }

  // Quad kQuad of one half of a tile. Nibbles are loaded once for each half: that is cheaper than keeping both halves of
  // all rows in registers.
  template <CodeKind kKind, int kHalf, int kQuad, int kRows, int kVectors>
  PENSTOCK_INLINE void dot_quad(const uint8_t* codes, const int8x16_t (&x)[kRows],
                                                             int32x4_t (&sum)[kRows][kVectors]) {
    constexpr int64_t quad = kKind == CodeKind::nibbles ? kQuad : kQuad + 4 * kHalf;
    int8x16_t weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      uint8x16_t bytes = vld1q_u8(codes + quad * kQuadBytes + v * 16);
      if (kKind == CodeKind::nibbles) bytes = kHalf == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4);
      weights[v] = vreinterpretq_s8_u8(bytes);
    }
    dot<kQuad>(sum, weights, x);
  }

  template <CodeKind kKind, int kHalf, int kRows, int kVectors>
  PENSTOCK_INLINE void dot_half(const uint8_t* codes, const int8_t* x_codes,
                                                             int64_t x_stride, int32x4_t (&sum)[kRows][kVectors]) {
    int8x16_t x[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) x[r] = vld1q_s8(x_codes + r * x_stride + kHalf * 16);
    dot_quad<kKind, kHalf, 0>(codes, x, sum);
    dot_quad<kKind, kHalf, 1>(codes, x, sum);
    dot_quad<kKind, kHalf, 2>(codes, x, sum);
    dot_quad<kKind, kHalf, 3>(codes, x, sum);
  }

  template <int kRows, int kVectors>
  PENSTOCK_INLINE void clear(int32x4_t (&sum)[kRows][kVectors]) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = vdupq_n_s32(kZeroBits);
    }
  }

  template <int kRows, int kVectors>
  PENSTOCK_INLINE void add_scaled(const Part& part, const uint8_t* tile, int64_t first_output,
                                                const int32x4_t (&sum)[kRows][kVectors], const float (&scales)[kRows],
                                                const float (&row_sums)[kRows], float32x4_t (&total)[kRows][kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const float32x4_t scale = load_factor(part, tile, first_output + v * kVectorOutputs);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const float32x4_t value = vsubq_f32(vreinterpretq_f32_s32(sum[r][v]), vdupq_n_f32(kCodeRounder));
        total[r][v] = vfmaq_f32(total[r][v], value, vmulq_n_f32(scale, scales[r]));
      }
      if (!part.has_offsets) continue;
      const float32x4_t offset = load_factor(part, tile + part.table_bytes(), first_output + v * kVectorOutputs);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r][v] = vfmaq_n_f32(total[r][v], offset, row_sums[r]);
    }
  }

  template <CodeKind kKind, int kGroups, int kRows, int kVectors>
  static void block(const IntegerCall& call, const Part& part, const uint8_t* tiles, const PanelCodes& codes,
                    int64_t row, int64_t first_vector, float* sums) {
    const int64_t first_output = first_vector * kVectorOutputs;
    float32x4_t total[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[r][v] = vdupq_n_f32(0.0f);
    }
    const uint8_t* at = codes.data + first_output * kQuadInputs;
    const uint8_t* tile = tiles;
    const int8_t* x_codes = call.row_codes(row);
    const RoundedGroup* groups = call.row_groups(row);
    const int64_t x_stride = call.num_tiles * kTileInputs;
    for (int64_t t = 0; t < call.num_tiles; ++t, at += codes.step, tile += part.tile_bytes) {
      const int8_t* x = x_codes + t * kTileInputs;
      const auto finish = [&](int group, const int32x4_t(&sum)[kRows][kVectors])
                              __attribute__((always_inline)) {
        float scales[kRows], row_sums[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const RoundedGroup& rounded = groups[r * call.num_tiles + t];
          scales[r] = rounded.scale;
          row_sums[r] = PlainEngine::group_sum<kGroups>(rounded, group);
        }
        add_scaled(part, tile, group * kPanelOutputs + first_output, sum, scales, row_sums, total);
      };
      int32x4_t sum[kRows][kVectors];
      clear(sum);
      dot_half<kKind, 0>(at, x, x_stride, sum);
      if (kGroups == 2) {
        finish(0, sum);
        clear(sum);
      }
      dot_half<kKind, 1>(at, x, x_stride, sum);
      finish(kGroups - 1, sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        vst1q_f32(sums + r * kPanelOutputs + first_output + v * kVectorOutputs, total[r][v]);
      }
    }
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
