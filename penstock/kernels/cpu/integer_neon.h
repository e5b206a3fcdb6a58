// Scaled sums of products in whole numbers with ARM's dot products of bytes. Included under such a target only.
#pragma once

#include <arm_neon.h>

#include "integer_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

struct NeonEngine {
  static constexpr int kVectorOutputs = 4;
  static constexpr int kVectors = kPanelOutputs / kVectorOutputs;
  // The bits of kCodeRounder, 1.5 * 2^23. The sums of a tile are below 2^22. A sum that starts from these bits is the
  // float kCodeRounder + sum, so a subtraction replaces the conversion, which takes as long as four products.
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
    // The last blocks of rows prefetch the tiles that are unpacked next, some lines in each block: prefetching all
    // lines at once keeps the core waiting, and lines that are prefetched too early are evicted by the other rows.
    const int64_t blocks = ceil_div(rows, int64_t{2});
    const int64_t share = round_up(ceil_div(run.next_step, blocks), int64_t{64});
    const int64_t asking = kKind == CodeKind::unpacked ? ceil_div(run.next_step, share) : 0;
    for (int64_t b = 0; b < blocks; ++b) {
      TileRun own = run;
      const int64_t turn = b - (blocks - asking);
      own.next = turn < 0 || run.next == nullptr ? nullptr : run.next + turn * run.num_tiles * share;
      own.next_step = share;
      const int64_t r = 2 * b;
      if (r + 2 <= rows) {
        block<kKind, kGroups, 2>(call, own, row + r, sums + r * kPanelOutputs);
      } else {
        block<kKind, kGroups, 1>(call, own, row + r, sums + r * kPanelOutputs);
      }
    }
  }

  // A load takes no time from the two units that multiply; a copy of a register does.
  PENSTOCK_INLINE int32x4_t load_zero() {
    alignas(16) static constexpr int32_t zero[kVectorOutputs] = {kZeroBits, kZeroBits, kZeroBits, kZeroBits};
    int32x4_t loaded;
    asm volatile("ldr %q0, %1" : "=w"(loaded) : "Q"(zero));
    return loaded;
  }

  // Sums of products with the high and with the low bytes of some rows.
  template <int kRows>
  struct Sums {
    int32x4_t high[kRows][kVectors], low[kRows][kVectors];

    inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          high[r][v] = load_zero();
          low[r][v] = load_zero();
        }
      }
    }

    // Keeps the compiler from reordering products: it would move sums to memory and keep weights in registers.
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

  template <int kGroups, typename AnySums, int kRows>
  PENSTOCK_INLINE void add_scaled(const TileRun& run, const uint8_t* tile, int group, const RoundedGroup* rounded,
                                  int64_t groups_stride, const AnySums& sum, float32x4_t (&totals)[kRows][kVectors]) {
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
        float32x4_t total = vfmaq_f32(totals[r][v], sum.value(r, v), vmulq_laneq_f32(scale, factors[r], 0));
        if (run.has_offsets) {
          total = kGroups == 1
                      ? vfmaq_laneq_f32(total, offset, factors[r], 1)
                      : vfmaq_n_f32(total, offset, group_sum<kGroups>(rounded[r * groups_stride], group));
        }
        totals[r][v] = total;
      }
    }
  }

  // Sums of code × code of two rows. The high bytes come first and are shifted before the low bytes are added, so that
  // eight registers hold what `Sums` holds in sixteen, and the totals of the outputs stay in registers too.
  struct PairSums {
    int32x4_t sum[2][kVectors];

    inline __attribute__((always_inline)) float32x4_t value(int r, int v) const { return vcvtq_f32_s32(sum[r][v]); }
  };

  // The sums of group kGroup of a tile of bytes. Written out: GCC would keep weights in registers and totals in memory,
  // where a store takes as long as two products.
  template <int kGroups, int kGroup>
  PENSTOCK_INLINE void multiply_pair(const uint8_t* codes, const int8_t* x, int64_t x_stride,
                                     PairSums* out) {
    int32x4_t (&sum)[2][kVectors] = out->sum;
#define PENSTOCK_ADD_QUAD(at, lane)                      \
  "ldp q16, q17, [%[codes], #" #at "]\n"                 \
  "ldp q18, q19, [%[codes], #" #at " + 32]\n"            \
  "sdot %[a0].4s, v16.16b, v20.4b[" #lane "]\n"          \
  "sdot %[b0].4s, v16.16b, v21.4b[" #lane "]\n"          \
  "sdot %[a1].4s, v17.16b, v20.4b[" #lane "]\n"          \
  "sdot %[b1].4s, v17.16b, v21.4b[" #lane "]\n"          \
  "sdot %[a2].4s, v18.16b, v20.4b[" #lane "]\n"          \
  "sdot %[b2].4s, v18.16b, v21.4b[" #lane "]\n"          \
  "sdot %[a3].4s, v19.16b, v20.4b[" #lane "]\n"          \
  "sdot %[b3].4s, v19.16b, v21.4b[" #lane "]\n"
#define PENSTOCK_ADD_HALF(x_at, at)                     \
  "ldr q20, [%[a], #" #x_at "]\n"                       \
  "ldr q21, [%[b], #" #x_at "]\n"                       \
  PENSTOCK_ADD_QUAD(at, 0) PENSTOCK_ADD_QUAD(at + 64, 1) \
  PENSTOCK_ADD_QUAD(at + 128, 2) PENSTOCK_ADD_QUAD(at + 192, 3)
#define PENSTOCK_CLEAR(sum) "movi %[" #sum "].4s, #0\n"
#define PENSTOCK_SHIFT(sum) "shl %[" #sum "].4s, %[" #sum "].4s, #8\n"
#define PENSTOCK_FOR_SUMS(what) what(a0) what(b0) what(a1) what(b1) what(a2) what(b2) what(a3) what(b3)
#define PENSTOCK_MULTIPLY_PAIR(high, low)                                                                         \
  asm(PENSTOCK_FOR_SUMS(PENSTOCK_CLEAR) high PENSTOCK_FOR_SUMS(PENSTOCK_SHIFT) low                                \
      : [a0] "=&w"(sum[0][0]), [a1] "=&w"(sum[0][1]), [a2] "=&w"(sum[0][2]), [a3] "=&w"(sum[0][3]),               \
        [b0] "=&w"(sum[1][0]), [b1] "=&w"(sum[1][1]), [b2] "=&w"(sum[1][2]), [b3] "=&w"(sum[1][3])                \
      : [codes] "r"(codes), [a] "r"(x), [b] "r"(x + x_stride),                                                    \
        "m"(*reinterpret_cast<const uint8_t(*)[kTileElements]>(codes)),                                           \
        "m"(*reinterpret_cast<const int8_t(*)[kRowTileBytes]>(x)),                                                \
        "m"(*reinterpret_cast<const int8_t(*)[kRowTileBytes]>(x + x_stride))                                      \
      : "v16", "v17", "v18", "v19", "v20", "v21")
    if constexpr (kGroups == 1) {
      PENSTOCK_MULTIPLY_PAIR(PENSTOCK_ADD_HALF(0, 0) PENSTOCK_ADD_HALF(16, 256),
                             PENSTOCK_ADD_HALF(32, 0) PENSTOCK_ADD_HALF(48, 256));
    } else if constexpr (kGroup == 0) {
      PENSTOCK_MULTIPLY_PAIR(PENSTOCK_ADD_HALF(0, 0), PENSTOCK_ADD_HALF(32, 0));
    } else {
      PENSTOCK_MULTIPLY_PAIR(PENSTOCK_ADD_HALF(16, 256), PENSTOCK_ADD_HALF(48, 256));
    }
#undef PENSTOCK_MULTIPLY_PAIR
#undef PENSTOCK_FOR_SUMS
#undef PENSTOCK_SHIFT
#undef PENSTOCK_CLEAR
#undef PENSTOCK_ADD_HALF
#undef PENSTOCK_ADD_QUAD
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
    float32x4_t totals[kRows][kVectors];
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) totals[r][v] = vld1q_f32(sums + r * kPanelOutputs + v * kVectorOutputs);
    }
    for (int64_t t = 0; t < run.num_tiles; ++t, tile += run.step, x += kRowTileBytes, ++rounded) {
      prefetch_ahead<kKind>(run, tile, t);
      const uint8_t* codes = tile + run.codes_at;
      if constexpr (kKind != CodeKind::nibbles && kRows == 2) {
        PairSums sum;
        multiply_pair<kGroups, 0>(codes, x, x_stride, &sum);
        add_scaled<kGroups>(run, tile, 0, rounded, groups_stride, sum, totals);
        if constexpr (kGroups == 2) {
          multiply_pair<kGroups, 1>(codes, x, x_stride, &sum);
          add_scaled<kGroups>(run, tile, 1, rounded, groups_stride, sum, totals);
        }
      } else {
        Sums<kRows> sum;
        sum.clear();
        add_half<kKind, 0>(codes, x, x_stride, sum);
        if (kGroups == 2) {
          add_scaled<kGroups>(run, tile, 0, rounded, groups_stride, sum, totals);
          sum.clear();
        }
        add_half<kKind, 1>(codes, x, x_stride, sum);
        add_scaled<kGroups>(run, tile, kGroups - 1, rounded, groups_stride, sum, totals);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) vst1q_f32(sums + r * kPanelOutputs + v * kVectorOutputs, totals[r][v]);
    }
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
