// Scaled sums of products in whole numbers with x86's products of bytes, for vectors of 32 or 64 bytes. Included under a
// target that has AVX2 or AVX-512BW; with PENSTOCK_DOT_PRODUCTS, one that has VNNI for these vectors.
#pragma once

#include <immintrin.h>

#include "integer_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The names of intrinsics and of types differ between the two sizes in their first letters only.
#if PENSTOCK_REGISTER_BYTES == 64
#define PENSTOCK_SIZED(name) _mm512_##name
#define PENSTOCK_DOT _mm512_dpbusd_epi32
typedef __m512i VectorBytes;
typedef __m512 VectorReals;
typedef __m256i VectorHalves;
constexpr int kVectorRows = 8;  // of codes, whose sums stay in registers together
#else
#define PENSTOCK_SIZED(name) _mm256_##name
#define PENSTOCK_DOT _mm256_dpbusd_avx_epi32
typedef __m256i VectorBytes;
typedef __m256 VectorReals;
typedef __m128i VectorHalves;
constexpr int kVectorRows = 2;
#endif

struct Vector {
  typedef VectorBytes Bytes;
  typedef VectorReals Reals;
  static constexpr int kOutputs = PENSTOCK_REGISTER_BYTES / 4;
  static constexpr int kRowsAtOnce = kVectorRows;

  PENSTOCK_INLINE Bytes load(const uint8_t* from) {
    Bytes out;
    memcpy(&out, from, sizeof out);
    return out;
  }
  PENSTOCK_INLINE Bytes broadcast(int32_t value) { return PENSTOCK_SIZED(set1_epi32)(value); }
  PENSTOCK_INLINE Bytes lower(Bytes a) { return a & PENSTOCK_SIZED(set1_epi8)(15); }
  PENSTOCK_INLINE Bytes upper(Bytes a) { return lower(PENSTOCK_SIZED(srli_epi16)(a, 4)); }
  PENSTOCK_INLINE Bytes add(Bytes a, Bytes b) { return PENSTOCK_SIZED(add_epi32)(a, b); }
  PENSTOCK_INLINE Bytes add_words(Bytes a, Bytes b) { return PENSTOCK_SIZED(add_epi16)(a, b); }
  PENSTOCK_INLINE Bytes pairs(Bytes a, Bytes b) { return PENSTOCK_SIZED(maddubs_epi16)(a, b); }
  PENSTOCK_INLINE Bytes widen_pairs(Bytes a) { return PENSTOCK_SIZED(madd_epi16)(a, PENSTOCK_SIZED(set1_epi16)(1)); }
  PENSTOCK_INLINE Bytes times_16(Bytes a) { return PENSTOCK_SIZED(slli_epi32)(a, 4); }
#ifdef PENSTOCK_DOT_PRODUCTS
  PENSTOCK_INLINE Bytes dot(Bytes sum, Bytes a, Bytes b) { return PENSTOCK_DOT(sum, a, b); }
#endif
  PENSTOCK_INLINE Reals zero() { return PENSTOCK_SIZED(setzero_ps)(); }
  PENSTOCK_INLINE Reals broadcast(float value) { return PENSTOCK_SIZED(set1_ps)(value); }
  PENSTOCK_INLINE Reals to_reals(Bytes a) { return PENSTOCK_SIZED(cvtepi32_ps)(a); }
  PENSTOCK_INLINE Reals multiply(Reals a, Reals b) { return PENSTOCK_SIZED(mul_ps)(a, b); }
  PENSTOCK_INLINE Reals multiply_add(Reals a, Reals b, Reals c) { return PENSTOCK_SIZED(fmadd_ps)(a, b, c); }
  PENSTOCK_INLINE void store(float* to, Reals a) { PENSTOCK_SIZED(storeu_ps)(to, a); }
  PENSTOCK_INLINE Reals load_factor(bool halves, const uint8_t* table, int64_t at) {
    if (!halves) return PENSTOCK_SIZED(loadu_ps)(reinterpret_cast<const float*>(table) + at);
    VectorHalves narrow;
    memcpy(&narrow, table + at * 2, sizeof narrow);
    return PENSTOCK_SIZED(cvtph_ps)(narrow);
  }
};
#undef PENSTOCK_SIZED
#undef PENSTOCK_DOT

// Sums of weight × activation in 32-bit lanes, one for each output.
#ifdef PENSTOCK_DOT_PRODUCTS
template <CodeKind>
struct Dots {
  typedef Vector::Bytes Weights;
  Vector::Bytes sum[2];  // of the two halves of a tile, so that neither waits for the other

  inline __attribute__((always_inline)) void clear() { sum[0] = sum[1] = Vector::broadcast(0); }
  PENSTOCK_INLINE Weights prepare(Vector::Bytes weights) { return weights; }
  inline __attribute__((always_inline)) void add(int half, Weights weights, Vector::Bytes x) {
    sum[half] = Vector::dot(sum[half], weights, x);
  }
  inline __attribute__((always_inline)) Vector::Bytes total() const { return Vector::add(sum[0], sum[1]); }
};
#else
// A product of four bits and eight fits sixteen, and so does the sum of the sixteen of a tile. Codes of eight bits are
// two of four.
template <CodeKind kKind>
struct Dots {
  struct Weights {
    Vector::Bytes lower, upper;
  };
  Vector::Bytes lower, upper;

  inline __attribute__((always_inline)) void clear() { lower = upper = Vector::broadcast(0); }
  PENSTOCK_INLINE Weights prepare(Vector::Bytes weights) {
    if (kKind == CodeKind::bytes) return {Vector::lower(weights), Vector::upper(weights)};
    return {weights, weights};
  }
  inline __attribute__((always_inline)) void add(int, const Weights& weights, Vector::Bytes x) {
    lower = Vector::add_words(lower, Vector::pairs(weights.lower, x));
    if (kKind == CodeKind::bytes) upper = Vector::add_words(upper, Vector::pairs(weights.upper, x));
  }
  inline __attribute__((always_inline)) Vector::Bytes total() const {
    const Vector::Bytes sum = Vector::widen_pairs(lower);
    if (kKind != CodeKind::bytes) return sum;
    return Vector::add(sum, Vector::times_16(Vector::widen_pairs(upper)));
  }
};
#endif

struct ByteEngine {
  static constexpr int kVectors = kPanelOutputs / Vector::kOutputs;

  template <CodeKind kKind, int kGroups>
  static void multiply(const IntegerCall& call, const Part& part, const uint8_t* tiles, const PanelCodes& codes,
                       int64_t row, int64_t rows, float* sums) {
    constexpr int most = Vector::kRowsAtOnce;
    int64_t r = 0;
    for (; r + most <= rows; r += most) {
      block<kKind, kGroups, most>(call, part, tiles, codes, row + r, sums + r * kPanelOutputs);
    }
    if (most > 4 && r + 4 <= rows) {
      block<kKind, kGroups, 4>(call, part, tiles, codes, row + r, sums + r * kPanelOutputs);
      r += 4;
    }
    for (; r < rows; ++r) block<kKind, kGroups, 1>(call, part, tiles, codes, row + r, sums + r * kPanelOutputs);
  }

  PENSTOCK_INLINE Vector::Bytes broadcast_quad(const int8_t* from) {
    int32_t quad;
    memcpy(&quad, from, sizeof quad);
    return Vector::broadcast(quad);
  }

  template <CodeKind kKind, int kGroups, int kRows>
  PENSTOCK_INLINE void add_quad(const Vector::Bytes (&loaded)[kVectors], int64_t quad, const int8_t* x,
                                              int64_t x_stride, Dots<kKind> (&sum)[kGroups][kRows][kVectors]) {
    const int half = quad < kQuadsPerTile / 2 ? 0 : 1, group = kGroups == 1 ? 0 : half;
    typename Dots<kKind>::Weights weights[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) weights[v] = Dots<kKind>::prepare(loaded[v]);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector::Bytes inputs = broadcast_quad(x + r * x_stride + quad * kQuadInputs);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[group][r][v].add(half, weights[v], inputs);
    }
  }

  template <CodeKind kKind, int kGroups, int kRows>
  PENSTOCK_INLINE void add_tile(const uint8_t* codes, const int8_t* x, int64_t x_stride,
                                              Dots<kKind> (&sum)[kGroups][kRows][kVectors]) {
    constexpr int64_t vector_bytes = Vector::kOutputs * kQuadInputs;
#pragma GCC unroll 4
    for (int64_t quad = 0; quad < kQuadsPerTile / 2; ++quad) {
      Vector::Bytes first[kVectors], second[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        first[v] = Vector::load(codes + quad * kQuadBytes + v * vector_bytes);
        if (kKind == CodeKind::nibbles) {
          second[v] = Vector::upper(first[v]);
          first[v] = Vector::lower(first[v]);
        } else {
          second[v] = Vector::load(codes + (quad + kQuadsPerTile / 2) * kQuadBytes + v * vector_bytes);
        }
      }
      add_quad<kKind, kGroups, kRows>(first, quad, x, x_stride, sum);
      add_quad<kKind, kGroups, kRows>(second, quad + kQuadsPerTile / 2, x, x_stride, sum);
    }
  }

  template <CodeKind kKind, int kGroups, int kRows>
  static void block(const IntegerCall& call, const Part& part, const uint8_t* tiles, const PanelCodes& codes,
                    int64_t row, float* sums) {
    Vector::Reals total[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) total[r][v] = Vector::zero();
    }
    const int8_t* x = call.row_codes(row);
    const RoundedGroup* rounded = call.row_groups(row);
    const int64_t x_stride = call.num_tiles * kTileInputs;
    for (int64_t t = 0; t < call.num_tiles; ++t) {
      const uint8_t* tile = tiles + t * part.tile_bytes;
      Dots<kKind> sum[kGroups][kRows][kVectors];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) sum[g][r][v].clear();
        }
      }
      add_tile<kKind, kGroups, kRows>(codes.data + t * codes.step, x + t * kTileInputs, x_stride, sum);
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = g * kPanelOutputs + v * Vector::kOutputs;
          const Vector::Reals scale = Vector::load_factor(part.half_scales, tile, at);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const RoundedGroup& group = rounded[r * call.num_tiles + t];
            add_scaled(unbiased<kKind, kGroups>(sum[g][r][v].total(), group, g), scale, group.scale, &total[r][v]);
          }
          if (!part.has_offsets) continue;
          const Vector::Reals offset = Vector::load_factor(part.half_scales, tile + part.table_bytes(), at);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const float row_sum = PlainEngine::group_sum<kGroups>(rounded[r * call.num_tiles + t], g);
            total[r][v] = Vector::multiply_add(offset, Vector::broadcast(row_sum), total[r][v]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Vector::store(sums + r * kPanelOutputs + v * Vector::kOutputs, total[r][v]);
      }
    }
  }

  // The bias of 8-bit codes is taken away from the sum.
  template <CodeKind kKind, int kGroups>
  PENSTOCK_INLINE Vector::Bytes unbiased(Vector::Bytes sum, const RoundedGroup& group, int half) {
    if (kKind != CodeKind::bytes) return sum;
    int32_t code_sum = group.code_sum;
    if (kGroups == 2) code_sum = half == 0 ? group.first_code_sum : group.code_sum - group.first_code_sum;
    return Vector::add(sum, Vector::broadcast(-kCodeBias * code_sum));
  }

  PENSTOCK_INLINE void add_scaled(Vector::Bytes sum, Vector::Reals scale, float row_scale,
                                                Vector::Reals* total) {
    const Vector::Reals both = Vector::multiply(scale, Vector::broadcast(row_scale));
    *total = Vector::multiply_add(Vector::to_reals(sum), both, *total);
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
