// Scaled sums of products in whole numbers with ARM's dot products of bytes. Included under such a target only.
#pragma once

#include <arm_neon.h>

#include "integer_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

struct NeonEngine {
  static constexpr int kVectorOutputs = 4;
  static constexpr int kVectors = kPanelOutputs / kVectorOutputs;
  // The bits of kCodeRounder, 1.5 * 2^23. The sums of a tile are below 2^22. A sum that starts from these bits is the float
  // kCodeRounder + sum, so a subtraction replaces the conversion, which takes as long as four products.
  static constexpr int32_t kZeroBits = 0x4b400000;
  static constexpr int64_t kWordRows = kBytesOnly, kTilesAtOnce = 32, kUnpackedBytes = kTileElements;
  static constexpr bool kWideBytes = false;

  // Converting a scale from float16 takes as long as four products too.
  static bool unpacks(const IntegerCall&, const Part& part, int64_t rows) {
    return part.format == Format::int4 ? rows > 4 : part.half_scales && rows > 8;
  }

  // The codes as 8-bit codes are packed.
  template <CodeKind kKind>
  static void unpack_codes(const uint8_t* from, uint8_t* to) {
    if (kKind == CodeKind::bytes) {
      memcpy(to, from, kTileElements);
      return;
    }
    for (int i = 0; i < kTileElements / 2; i += 16) {
      const uint8x16_t both = vld1q_u8(from + i);
      vst1q_u8(to + i, vandq_u8(both, vdupq_n_u8(15)));
      vst1q_u8(to + i + kTileElements / 2, vshrq_n_u8(both, 4));
    }
  }

  template <CodeKind kKind, int kGroups>
  static void multiply(const IntegerCall& call, const TileRun& run, int64_t row, int64_t rows, float* sums) {
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) block<kKind, kGroups, 2>(call, run, row + r, sums + r * kPanelOutputs);
    if (r < rows) block<kKind, kGroups, 1>(call, run, row + r, sums + r * kPanelOutputs);
  }

  // Sums of products with the high and with the low bytes of some rows.
  template <int kRows>
  struct Sums {
    int32x4_t high[kRows][kVectors], low[kRows][kVectors];

    inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) high[r][v] = low[r][v] = vdupq_n_s32(kZeroBits);
      }
    }

    // The compiler is not to move products across: it would keep sums in memory to keep weights in registers.
    inline __attribute__((always_inline)) void keep_in_registers() {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        asm volatile("" : "+w"(high[r][0]), "+w"(high[r][1]), "+w"(high[r][2]), "+w"(high[r][3]), "+w"(low[r][0]),
                 "+w"(low[r][1]), "+w"(low[r][2]), "+w"(low[r][3]));
      }
    }

    // 256 × high + low, with one rounding.
    inline __attribute__((always_inline)) float32x4_t value(int r, int v) const {
      const float32x4_t zero = vdupq_n_f32(kCodeRounder);
      const float32x4_t upper = vsubq_f32(vreinterpretq_f32_s32(high[r][v]), zero);
      const float32x4_t lower = vsubq_f32(vreinterpretq_f32_s32(low[r][v]), zero);
      return vfmaq_f32(lower, upper, vdupq_n_f32(256.0f));
    }
  };

  // Adds quad kQuad of one half of a tile.
  template <CodeKind kKind, int kHalf, int kQuad, int kRows>
  PENSTOCK_INLINE void add_quad(const uint8_t* codes, const int8x16_t (&high)[kRows], const int8x16_t (&low)[kRows],
                                Sums<kRows>& sum) {
    constexpr int64_t quad = kKind == CodeKind::nibbles ? kQuad : kQuad + 4 * kHalf;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      uint8x16_t bytes = vld1q_u8(codes + quad * kQuadBytes + v * 16);
      if (kKind == CodeKind::nibbles) bytes = kHalf == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4);
      const int8x16_t weights = vreinterpretq_s8_u8(bytes);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        sum.high[r][v] = vdotq_laneq_s32(sum.high[r][v], weights, high[r], kQuad);
        sum.low[r][v] = vdotq_laneq_s32(sum.low[r][v], weights, low[r], kQuad);
      }
    }
    sum.keep_in_registers();
  }

  template <CodeKind kKind, int kHalf, int kRows>
  PENSTOCK_INLINE void add_half(const uint8_t* codes, const int8_t* x, int64_t x_stride, Sums<kRows>& sum) {
    int8x16_t high[kRows], low[kRows];
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      high[r] = vld1q_s8(x + r * x_stride + kHalf * 16);
      low[r] = vld1q_s8(x + r * x_stride + kTileInputs + kHalf * 16);
    }
    add_quad<kKind, kHalf, 0>(codes, high, low, sum);
    add_quad<kKind, kHalf, 1>(codes, high, low, sum);
    add_quad<kKind, kHalf, 2>(codes, high, low, sum);
    add_quad<kKind, kHalf, 3>(codes, high, low, sum);
  }

  PENSTOCK_INLINE float32x4_t load_factor(const TileRun& run, const uint8_t* table, int64_t at) {
    return run.half_scales
               ? vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(table) + at)))
               : vld1q_f32(reinterpret_cast<const float*>(table) + at);
  }

  template <int kGroups, int kRows>
  PENSTOCK_INLINE void add_scaled(const TileRun& run, const uint8_t* tile, int group, const RoundedGroup* rounded,
                                  int64_t groups_stride, const Sums<kRows>& sum, float* sums) {
    float32x4_t factors[kRows];  // the scale and the sum of the activations
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) factors[r] = vld1q_f32(&rounded[r * groups_stride].scale);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = group * kPanelOutputs + v * kVectorOutputs;
      const float32x4_t scale = load_factor(run, tile, at);
      const float32x4_t offset = run.has_offsets ? load_factor(run, tile + run.offsets_at, at) : vdupq_n_f32(0.0f);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        float* to = sums + r * kPanelOutputs + v * kVectorOutputs;
        float32x4_t total = vfmaq_f32(vld1q_f32(to), sum.value(r, v), vmulq_laneq_f32(scale, factors[r], 0));
        if (run.has_offsets) {
          total = kGroups == 1
                      ? vfmaq_laneq_f32(total, offset, factors[r], 1)
                      : vfmaq_n_f32(total, offset, group_sum<kGroups>(rounded[r * groups_stride], group));
        }
        vst1q_f32(to, total);
      }
    }
  }

  template <CodeKind kKind, int kGroups, int kRows>
  static __attribute__((noinline)) void block(const IntegerCall& call, const TileRun& run, int64_t row, float* sums) {
    with_known_run<kKind>(run, [&](const TileRun& known) __attribute__((always_inline)) {
      add_block<kKind, kGroups, kRows>(call, known, row, sums);
    });
  }

  template <CodeKind kKind, int kGroups, int kRows>
  PENSTOCK_INLINE void add_block(const IntegerCall& call, const TileRun& run, int64_t row, float* sums) {
    const uint8_t* tile = run.data;
    const int8_t* x = call.row_bytes(row) + run.first_tile * kRowTileBytes;
    const RoundedGroup* rounded = call.row_groups(row) + run.first_tile;
    const int64_t x_stride = call.row_stride(), groups_stride = call.num_tiles;
    for (int64_t t = 0; t < run.num_tiles; ++t, tile += run.step, x += kRowTileBytes, ++rounded) {
      prefetch_ahead<kKind>(run, tile, t);
      const uint8_t* codes = tile + run.codes_at;
      Sums<kRows> sum;
      sum.clear();
      add_half<kKind, 0>(codes, x, x_stride, sum);
      if (kGroups == 2) {
        add_scaled<kGroups>(run, tile, 0, rounded, groups_stride, sum, sums);
        sum.clear();
      }
      add_half<kKind, 1>(codes, x, x_stride, sum);
      add_scaled<kGroups>(run, tile, kGroups - 1, rounded, groups_stride, sum, sums);
    }
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
