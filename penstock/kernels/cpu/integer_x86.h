// Scaled sums of products in whole numbers with x86's products of bytes, for vectors of 32 or 64 bytes. Included under a
// target that has AVX2 or AVX-512BW; with PENSTOCK_DOT_PRODUCTS, one that has VNNI for these vectors.
#pragma once

#include <immintrin.h>

#include "integer_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

#if PENSTOCK_REGISTER_BYTES == 64
struct Vector {
  typedef __m512i Bytes;
  typedef __m512 Reals;
  static constexpr int kOutputs = 16;
  static constexpr int kRowsAtOnce = 8;
  static inline __attribute__((always_inline)) Bytes load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static inline __attribute__((always_inline)) Bytes broadcast(int32_t value) { return _mm512_set1_epi32(value); }
  static inline __attribute__((always_inline)) Bytes lower(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static inline __attribute__((always_inline)) Bytes upper(Bytes a) { return lower(_mm512_srli_epi16(a, 4)); }
  static inline __attribute__((always_inline)) Bytes add(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
  static inline __attribute__((always_inline)) Bytes add_words(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
  static inline __attribute__((always_inline)) Bytes pairs(Bytes a, Bytes b) { return _mm512_maddubs_epi16(a, b); }
  static inline __attribute__((always_inline)) Bytes widen_pairs(Bytes a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
  static inline __attribute__((always_inline)) Bytes times_16(Bytes a) { return _mm512_slli_epi32(a, 4); }
#ifdef PENSTOCK_DOT_PRODUCTS
  static inline __attribute__((always_inline)) Bytes dot(Bytes sum, Bytes a, Bytes b) { return _mm512_dpbusd_epi32(sum, a, b); }
#endif
  static inline __attribute__((always_inline)) Reals zero() { return _mm512_setzero_ps(); }
  static inline __attribute__((always_inline)) Reals broadcast(float value) { return _mm512_set1_ps(value); }
  static inline __attribute__((always_inline)) Reals to_reals(Bytes a) { return _mm512_cvtepi32_ps(a); }
  static inline __attribute__((always_inline)) Reals multiply(Reals a, Reals b) { return _mm512_mul_ps(a, b); }
  static inline __attribute__((always_inline)) Reals multiply_add(Reals a, Reals b, Reals c) { return _mm512_fmadd_ps(a, b, c); }
  static inline __attribute__((always_inline)) void store(float* to, Reals a) { _mm512_storeu_ps(to, a); }
  static inline __attribute__((always_inline)) Reals load_factor(bool halves, const uint8_t* table, int64_t at) {
    if (!halves) return _mm512_loadu_ps(reinterpret_cast<const float*>(table) + at);
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table + at * 2)));
  }
};
#else
struct Vector {
  typedef __m256i Bytes;
  typedef __m256 Reals;
  static constexpr int kOutputs = 8;
  static constexpr int kRowsAtOnce = 2;
  static inline __attribute__((always_inline)) Bytes load(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static inline __attribute__((always_inline)) Bytes broadcast(int32_t value) { return _mm256_set1_epi32(value); }
  static inline __attribute__((always_inline)) Bytes lower(Bytes a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
  static inline __attribute__((always_inline)) Bytes upper(Bytes a) { return lower(_mm256_srli_epi16(a, 4)); }
  static inline __attribute__((always_inline)) Bytes add(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
  static inline __attribute__((always_inline)) Bytes add_words(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
  static inline __attribute__((always_inline)) Bytes pairs(Bytes a, Bytes b) { return _mm256_maddubs_epi16(a, b); }
  static inline __attribute__((always_inline)) Bytes widen_pairs(Bytes a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
  static inline __attribute__((always_inline)) Bytes times_16(Bytes a) { return _mm256_slli_epi32(a, 4); }
#ifdef PENSTOCK_DOT_PRODUCTS
  static inline __attribute__((always_inline)) Bytes dot(Bytes sum, Bytes a, Bytes b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#endif
  static inline __attribute__((always_inline)) Reals zero() { return _mm256_setzero_ps(); }
  static inline __attribute__((always_inline)) Reals broadcast(float value) { return _mm256_set1_ps(value); }
  static inline __attribute__((always_inline)) Reals to_reals(Bytes a) { return _mm256_cvtepi32_ps(a); }
  static inline __attribute__((always_inline)) Reals multiply(Reals a, Reals b) { return _mm256_mul_ps(a, b); }
  static inline __attribute__((always_inline)) Reals multiply_add(Reals a, Reals b, Reals c) { return _mm256_fmadd_ps(a, b, c); }
  static inline __attribute__((always_inline)) void store(float* to, Reals a) { _mm256_storeu_ps(to, a); }
  static inline __attribute__((always_inline)) Reals load_factor(bool halves, const uint8_t* table, int64_t at) {
    if (!halves) return _mm256_loadu_ps(reinterpret_cast<const float*>(table) + at);
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + at * 2)));
  }
};
#endif

// Sums of weight × activation in 32-bit lanes, one for each output.
#ifdef PENSTOCK_DOT_PRODUCTS
template <CodeKind>
struct Dots {
  typedef Vector::Bytes Weights;
  Vector::Bytes sum[2];  // of the two halves of a tile, so that neither waits for the other

  inline __attribute__((always_inline)) void clear() { sum[0] = sum[1] = Vector::broadcast(0); }
  static inline __attribute__((always_inline)) Weights prepare(Vector::Bytes weights) { return weights; }
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
  static inline __attribute__((always_inline)) Weights prepare(Vector::Bytes weights) {
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

  static inline __attribute__((always_inline)) Vector::Bytes broadcast_quad(const int8_t* from) {
    int32_t quad;
    memcpy(&quad, from, sizeof quad);
    return Vector::broadcast(quad);
  }

  template <CodeKind kKind, int kGroups, int kRows>
  static inline __attribute__((always_inline)) void add_quad(const Vector::Bytes (&loaded)[kVectors], int64_t quad, const int8_t* x,
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
  static inline __attribute__((always_inline)) void add_tile(const uint8_t* codes, const int8_t* x, int64_t x_stride,
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
  static inline __attribute__((always_inline)) Vector::Bytes unbiased(Vector::Bytes sum, const RoundedGroup& group, int half) {
    if (kKind != CodeKind::bytes) return sum;
    int32_t code_sum = group.code_sum;
    if (kGroups == 2) code_sum = half == 0 ? group.first_code_sum : group.code_sum - group.first_code_sum;
    return Vector::add(sum, Vector::broadcast(-kCodeBias * code_sum));
  }

  static inline __attribute__((always_inline)) void add_scaled(Vector::Bytes sum, Vector::Reals scale, float row_scale,
                                                Vector::Reals* total) {
    const Vector::Reals both = Vector::multiply(scale, Vector::broadcast(row_scale));
    *total = Vector::multiply_add(Vector::to_reals(sum), both, *total);
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
