// Scaled sums of products in whole numbers with x86's products of bytes and of words, for vectors of 32 or 64 bytes.
// Included under a target that has AVX2 or AVX-512BW; with PENSTOCK_DOT_PRODUCTS, one that has VNNI for these vectors.
//
// Few rows multiply 4-bit weights as bytes, which are unpacked in registers: a product with the high bytes of the
// activations and one with the low bytes. More rows multiply words. Their weights are unpacked to words in the nearest
// cache, as [16 pairs of inputs][16 outputs][2 inputs]. Few rows with 8-bit weights multiply bytes where there are dot
// products, else words: without dot products, the sum of two products of 8-bit numbers does not fit its 16 bits.
#pragma once

#include <immintrin.h>

#include "integer_impl.h"
#include "register_tile.h"

namespace penstock {
namespace PENSTOCK_ISA {

// The names of intrinsics and of types differ between the two sizes in their first letters only.
#if PENSTOCK_REGISTER_BYTES == 64
#define PENSTOCK_SIZED(name) _mm512_##name
#define PENSTOCK_DOT(name) _mm512_##name##_epi32
typedef __m512i VectorBytes;
typedef __m512 VectorReals;
typedef __m256i VectorHalves;
constexpr int kWordBlockRows = 8;  // rows whose sums stay in registers together
constexpr int kByteBlockRows = 8;
#else
#define PENSTOCK_SIZED(name) _mm256_##name
#define PENSTOCK_DOT(name) _mm256_##name##_avx_epi32
typedef __m256i VectorBytes;
typedef __m256 VectorReals;
typedef __m128i VectorHalves;
constexpr int kWordBlockRows = 4;
constexpr int kByteBlockRows = 2;
#endif

struct Vector {
  typedef VectorBytes Bytes;
  typedef VectorReals Reals;
  static constexpr int kOutputs = PENSTOCK_REGISTER_BYTES / 4;

  PENSTOCK_INLINE Bytes load(const void* from) {
    Bytes out;
    memcpy(&out, from, sizeof out);
    return out;
  }
  PENSTOCK_INLINE void store(void* to, Bytes a) { memcpy(to, &a, sizeof a); }
  // Four bytes, which are the same in every lane.
  PENSTOCK_INLINE Bytes repeat(const void* from) {
    int32_t lane;
    memcpy(&lane, from, sizeof lane);
    return PENSTOCK_SIZED(set1_epi32)(lane);
  }
  PENSTOCK_INLINE Bytes broadcast(int32_t value) { return PENSTOCK_SIZED(set1_epi32)(value); }
  PENSTOCK_INLINE Bytes lower(Bytes a) { return a & PENSTOCK_SIZED(set1_epi8)(15); }
  PENSTOCK_INLINE Bytes upper(Bytes a) { return lower(PENSTOCK_SIZED(srli_epi16)(a, 4)); }
  // The first or the last two bytes of each lane, as words.
  PENSTOCK_INLINE Bytes first_pair(Bytes a) { return PENSTOCK_SIZED(shuffle_epi8)(a, pair_order(0)); }
  PENSTOCK_INLINE Bytes second_pair(Bytes a) { return PENSTOCK_SIZED(shuffle_epi8)(a, pair_order(2)); }
  PENSTOCK_INLINE Bytes pair_order(int byte) {
    alignas(64) int8_t order[PENSTOCK_REGISTER_BYTES];
    for (int i = 0; i < PENSTOCK_REGISTER_BYTES; ++i) {
      order[i] = static_cast<int8_t>(i % 2 == 0 ? i % 16 / 4 * 4 + byte + i % 4 / 2 : -1);
    }
    return load(order);
  }
  // Keeps the compiler from reordering products: it would move sums to memory and keep weights in registers.
  PENSTOCK_INLINE void keep_in_register(Bytes& sum) { asm volatile("" : "+v"(sum)); }
  PENSTOCK_INLINE Bytes add(Bytes a, Bytes b) { return PENSTOCK_SIZED(add_epi32)(a, b); }
  PENSTOCK_INLINE Bytes subtract_words(Bytes a, int16_t b) {
    return PENSTOCK_SIZED(sub_epi16)(a, PENSTOCK_SIZED(set1_epi16)(b));
  }
#ifdef PENSTOCK_DOT_PRODUCTS
  PENSTOCK_INLINE Bytes dot_bytes(Bytes sum, Bytes a, Bytes b) { return PENSTOCK_DOT(dpbusd)(sum, a, b); }
  PENSTOCK_INLINE Bytes dot_words(Bytes sum, Bytes a, Bytes b) { return PENSTOCK_DOT(dpwssd)(sum, a, b); }
  // 256 × high + low, of sums that dot_bytes has made.
  PENSTOCK_INLINE Bytes join(Bytes high, Bytes low) { return add(PENSTOCK_SIZED(slli_epi32)(high, 8), low); }
#else
  // Sums in 16 bits: the product of a 4-bit and an 8-bit number fits, and so does the sum of 16 such products of a
  // tile.
  PENSTOCK_INLINE Bytes dot_bytes(Bytes sum, Bytes a, Bytes b) {
    return PENSTOCK_SIZED(add_epi16)(sum, PENSTOCK_SIZED(maddubs_epi16)(a, b));
  }
  PENSTOCK_INLINE Bytes dot_words(Bytes sum, Bytes a, Bytes b) { return add(sum, PENSTOCK_SIZED(madd_epi16)(a, b)); }
  PENSTOCK_INLINE Bytes join(Bytes high, Bytes low) {
    return add(PENSTOCK_SIZED(madd_epi16)(high, PENSTOCK_SIZED(set1_epi16)(256)),
               PENSTOCK_SIZED(madd_epi16)(low, PENSTOCK_SIZED(set1_epi16)(1)));
  }
#endif
  PENSTOCK_INLINE Reals load_reals(const float* from) { return PENSTOCK_SIZED(loadu_ps)(from); }
  PENSTOCK_INLINE Reals broadcast(float value) { return PENSTOCK_SIZED(set1_ps)(value); }
  PENSTOCK_INLINE Reals to_reals(Bytes a) { return PENSTOCK_SIZED(cvtepi32_ps)(a); }
  PENSTOCK_INLINE Reals multiply(Reals a, Reals b) { return PENSTOCK_SIZED(mul_ps)(a, b); }
  PENSTOCK_INLINE Reals multiply_add(Reals a, Reals b, Reals c) { return PENSTOCK_SIZED(fmadd_ps)(a, b, c); }
  PENSTOCK_INLINE void store(float* to, Reals a) { PENSTOCK_SIZED(storeu_ps)(to, a); }
  PENSTOCK_INLINE Reals load_factor(bool halves, const uint8_t* table, int64_t at) {
    if (!halves) return load_reals(reinterpret_cast<const float*>(table) + at);
    VectorHalves narrow;
    memcpy(&narrow, table + at * 2, sizeof narrow);
    return PENSTOCK_SIZED(cvtph_ps)(narrow);
  }
};
#undef PENSTOCK_SIZED
#undef PENSTOCK_DOT

struct ByteEngine {
  static constexpr int kVectors = kPanelOutputs / Vector::kOutputs;
  static constexpr int64_t kVectorBytes = Vector::kOutputs * kQuadInputs;
  static constexpr int64_t kPairBytes = kPanelOutputs * 2 * sizeof(int16_t);
  static constexpr int64_t kWordRows = 2 * kByteBlockRows + 1, kTilesAtOnce = 16, kUnpackedBytes = kTileElements * 2;
#ifdef PENSTOCK_DOT_PRODUCTS
  static constexpr bool kWideBytes = false;
#else
  static constexpr bool kWideBytes = true;
#endif
  typedef Vector::Bytes RowSums[kVectors];

  static bool unpacks(const IntegerCall& call, const Part&, int64_t) { return call.bytes == nullptr; }

  template <CodeKind kKind>
  static void unpack_codes(const uint8_t* from, uint8_t* to) {
    const auto put = [&](int64_t quad, int64_t v, Vector::Bytes codes) __attribute__((always_inline)) {
      constexpr int16_t bias = kKind == CodeKind::bytes ? kCodeBias : 0;
      uint8_t* at = to + 2 * quad * kPairBytes + v * kVectorBytes;
      Vector::store(at, Vector::subtract_words(Vector::first_pair(codes), bias));
      Vector::store(at + kPairBytes, Vector::subtract_words(Vector::second_pair(codes), bias));
    };
    constexpr int64_t quads = kKind == CodeKind::nibbles ? kQuadsPerTile / 2 : kQuadsPerTile;
    for (int64_t quad = 0; quad < quads; ++quad) {
      for (int64_t v = 0; v < kVectors; ++v) {
        const Vector::Bytes codes = Vector::load(from + quad * kQuadBytes + v * kVectorBytes);
        if (kKind == CodeKind::bytes) {
          put(quad, v, codes);
        } else {
          put(quad, v, Vector::lower(codes));
          put(quad + kQuadsPerTile / 2, v, Vector::upper(codes));
        }
      }
    }
  }

  template <CodeKind kKind, int kGroups>
  static void multiply(const IntegerCall& call, const TileRun& run, int64_t row, int64_t rows, float* sums) {
    constexpr int most = kKind == CodeKind::unpacked ? kWordBlockRows : kByteBlockRows;
    int64_t r = 0;
    TileRun left = run;
    for (; r + most <= rows; r += most) {
      block<kKind, kGroups, most>(call, left, row + r, sums + r * kPanelOutputs);
      left.next = nullptr;  // the first rows have prefetched it
    }
    for_row_groups<most - 1>(rows - r, [&](auto count, int64_t first) {
      block<kKind, kGroups, decltype(count)::value>(call, left, row + r + first, sums + (r + first) * kPanelOutputs);
    });
  }

  // The codes of a tile of several rows. Three rows share a pointer, which addresses of x86 allow.
  template <int kRows>
  struct RowCodes {
    static constexpr int kPointers = (kRows + 2) / 3;
    const uint8_t* rows[kPointers];
    int64_t stride;

    inline __attribute__((always_inline)) RowCodes(const uint8_t* first, int64_t row_stride) : stride(row_stride) {
#pragma GCC unroll 3
      for (int i = 0; i < kPointers; ++i) rows[i] = first + 3 * i * row_stride;
    }
    inline __attribute__((always_inline)) void next_tile() {
#pragma GCC unroll 3
      for (int i = 0; i < kPointers; ++i) rows[i] += kRowTileBytes;
    }
    // Four bytes of row r.
    inline __attribute__((always_inline)) Vector::Bytes repeat(int r, int64_t at) const {
      return Vector::repeat(rows[r / 3] + r % 3 * stride + at);
    }
  };

  // Sums of products of words over kPairs pairs of inputs.
  template <CodeKind kKind, int kPairs, int kRows>
  PENSTOCK_INLINE void add_words(const uint8_t* codes, const RowCodes<kRows>& x, int64_t x_at, RowSums (&sum)[kRows]) {
#pragma GCC unroll 16
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      RowSums weights;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if (kKind == CodeKind::unpacked) {
          weights[v] = Vector::load(codes + pair * kPairBytes + v * kVectorBytes);
        } else {
          const Vector::Bytes quad = Vector::load(codes + pair / 2 * kQuadBytes + v * kVectorBytes);
          weights[v] = pair % 2 == 0 ? Vector::first_pair(quad) : Vector::second_pair(quad);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vector::Bytes inputs = x.repeat(r, x_at + pair * 4);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = Vector::dot_words(sum[r][v], weights[v], inputs);
          Vector::keep_in_register(sum[r][v]);
        }
      }
    }
  }

  // Sums of products of bytes over half a tile.
  template <CodeKind kKind, int kRows>
  PENSTOCK_INLINE void add_bytes(const uint8_t* codes, int half, const RowCodes<kRows>& x, RowSums (&high)[kRows],
                                 RowSums (&low)[kRows]) {
#pragma GCC unroll 4
    for (int64_t quad = 0; quad < kQuadsPerTile / 2; ++quad) {
      const int64_t stored = kKind == CodeKind::nibbles ? quad : quad + half * kQuadsPerTile / 2;
      const int64_t at = half * kTileInputs / 2 + quad * kQuadInputs;
      RowSums weights;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        weights[v] = Vector::load(codes + stored * kQuadBytes + v * kVectorBytes);
        if (kKind == CodeKind::nibbles) weights[v] = half == 0 ? Vector::lower(weights[v]) : Vector::upper(weights[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vector::Bytes upper = x.repeat(r, at), lower = x.repeat(r, at + kTileInputs);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          high[r][v] = Vector::dot_bytes(high[r][v], weights[v], upper);
          low[r][v] = Vector::dot_bytes(low[r][v], weights[v], lower);
          Vector::keep_in_register(high[r][v]);
          Vector::keep_in_register(low[r][v]);
        }
      }
    }
  }

  template <int kRows>
  PENSTOCK_INLINE void clear(RowSums (&sum)[kRows]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Vector::broadcast(0);
    }
  }

  static constexpr bool uses_words(CodeKind kind) {
    return kind == CodeKind::unpacked || (kind == CodeKind::bytes && kWideBytes);
  }

  // Products of a group of inputs, exact. 8-bit codes that are still packed have their bias.
  template <CodeKind kKind, int kGroups, int kRows>
  PENSTOCK_INLINE void sum_group(const uint8_t* codes, const RowCodes<kRows>& x, const RoundedGroup* rounded,
                                 int64_t groups_stride, int group, RowSums (&sum)[kRows]) {
    clear(sum);
    if constexpr (uses_words(kKind)) {
      constexpr int64_t pairs = kTileInputs / 2 / kGroups;
      const uint8_t* from = codes + group * pairs * (kKind == CodeKind::unpacked ? kPairBytes : kQuadBytes / 2);
      add_words<kKind, pairs>(from, x, group * pairs * 4, sum);
    } else {
      RowSums low[kRows];
      clear(low);
      add_bytes<kKind>(codes, group, x, sum, low);
      if (kGroups == 1) add_bytes<kKind>(codes, 1, x, sum, low);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Vector::join(sum[r][v], low[r][v]);
      }
    }
    if (kKind != CodeKind::bytes) return;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int32_t bias = -kCodeBias * group_code_sum<kGroups>(rounded[r * groups_stride], group);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Vector::add(sum[r][v], Vector::broadcast(bias));
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
    const RoundedGroup* rounded = call.row_groups(row) + run.first_tile;
    const int64_t groups_stride = call.num_tiles;
    const uint8_t* row_codes = uses_words(kKind) ? reinterpret_cast<const uint8_t*>(call.row_words(row))
                                                 : reinterpret_cast<const uint8_t*>(call.row_bytes(row));
    RowCodes<kRows> x(row_codes + run.first_tile * kRowTileBytes, call.row_stride());
    for (int64_t t = 0; t < run.num_tiles; ++t, tile += run.step, ++rounded, x.next_tile()) {
      prefetch_ahead<kKind>(run, tile, t);
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        RowSums sum[kRows];
        sum_group<kKind, kGroups>(tile + run.codes_at, x, rounded, groups_stride, g, sum);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = g * kPanelOutputs + v * Vector::kOutputs;
          const Vector::Reals scale = Vector::load_factor(run.half_scales, tile, at);
          Vector::Reals offset = Vector::broadcast(0.0f);
          if (run.has_offsets) offset = Vector::load_factor(run.half_scales, tile + run.offsets_at, at);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const RoundedGroup& group = rounded[r * groups_stride];
            float* to = sums + r * kPanelOutputs + v * Vector::kOutputs;
            const Vector::Reals both = Vector::multiply(scale, Vector::broadcast(group.scale));
            Vector::Reals total = Vector::multiply_add(Vector::to_reals(sum[r][v]), both, Vector::load_reals(to));
            if (run.has_offsets) {
              total = Vector::multiply_add(offset, Vector::broadcast(group_sum<kGroups>(group, g)), total);
            }
            Vector::store(to, total);
          }
        }
      }
    }
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
