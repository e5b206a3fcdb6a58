// A small block of a matrix product whose sums stay in registers, compiled once per instruction set. The left matrix is
// float32, row by row. The right matrix has groups of 16 columns in the layout of the KV cache (attention.h).
//
// Element (r, c) adds a[r][k] × b[k][c] in the order of k, one fused operation each, in blocks of every size.
#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// How many registers hold sums; the others hold a row of the right matrix and an element of the left one.
#if PENSTOCK_REGISTER_BYTES == 64
constexpr int kSumRegisters = 24;
constexpr int kMostTileRows = 8;
#elif PENSTOCK_REGISTER_BYTES == 32
constexpr int kSumRegisters = 12;
constexpr int kMostTileRows = 6;
#elif defined(__aarch64__)
constexpr int kSumRegisters = 16;
constexpr int kMostTileRows = 4;
#else
constexpr int kSumRegisters = 8;
constexpr int kMostTileRows = 2;
#endif

// How many groups of 16 columns a block of so many rows has. Fewer rows take more groups, so that consecutive additions
// do not depend on each other.
constexpr int groups_for(int rows) {
  return rows * 4 * kRegisters <= kSumRegisters ? 4 : rows * 2 * kRegisters <= kSumRegisters ? 2 : 1;
}

// The lower of two bfloat16 in each lane. Cores of ARM interleave words at twice the rate at which they shift lanes.
PENSTOCK_INLINE FloatRegister low_half(FloatRegister words) {
#if defined(__aarch64__)
  return (FloatRegister)vtrn1q_u16(vdupq_n_u16(0), (uint16x8_t)words);
#else
  return (FloatRegister)((UintRegister)words << 16);
#endif
}

template <typename Element, int kRows, int kGroups>
struct RegisterTile {
  static constexpr int kVectors = kGroups * kRegisters;
  FloatRegister sum[kRows][kVectors];

  __attribute__((always_inline)) void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = FloatRegister{};
    }
  }

  __attribute__((always_inline)) void load(const float* from, int64_t stride) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load_register(from + r * stride + v * kRegisterLanes);
    }
  }

  __attribute__((always_inline)) void store(float* to, int64_t stride) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) store_register(to + r * stride + v * kRegisterLanes, sum[r][v]);
    }
  }

  // `a` is element k of the first row, `b` holds row k of the right matrix.
  __attribute__((always_inline)) void add_row(const float* a, int64_t a_stride, const FloatRegister (&b)[kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const FloatRegister left = a[r * a_stride] - FloatRegister{};
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fused_multiply_add(b[v], left, sum[r][v]);
    }
  }

  // The next `depth` rows of the right matrix, an even number. b[g] is where group g begins; its rows (of two rows in
  // turns, in bfloat16) are `columns` elements of four bytes apart.
  __attribute__((always_inline)) void add(const float* a, int64_t a_stride, const uint8_t* const (&b)[kGroups],
                                          int64_t columns, int64_t depth) {
    constexpr int64_t rows_of_words = sizeof(Element) == 4 ? 1 : 2;
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; k += rows_of_words) {
      FloatRegister words[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* row = b[v / kRegisters] + k / rows_of_words * columns * 4;
        words[v] = load_register(reinterpret_cast<const float*>(row) + v % kRegisters * kRegisterLanes);
      }
      if constexpr (rows_of_words == 1) {
        add_row(a + k, a_stride, words);
      } else {
        FloatRegister row[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) row[v] = low_half(words[v]);
        add_row(a + k, a_stride, row);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) row[v] = (FloatRegister)((UintRegister)words[v] & 0xffff0000u);
        add_row(a + k + 1, a_stride, row);
      }
    }
  }
};

template <int kCount>
struct RowCount {
  static constexpr int value = kCount;
};

// body(RowCount<n>, first row) for neighbouring groups of kMost rows and for those that are left.
template <int kMost, typename Body>
PENSTOCK_INLINE void for_row_groups(int64_t num_rows, const Body& body, int64_t row = 0) {
  for (; row + kMost <= num_rows; row += kMost) body(RowCount<kMost>{}, row);
  if constexpr (kMost > 1) {
    if (row < num_rows) for_row_groups<kMost - 1>(num_rows, body, row);
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
