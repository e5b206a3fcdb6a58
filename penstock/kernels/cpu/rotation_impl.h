// A Hadamard transform of every 64 numbers of a row, compiled once per instruction set. It is its own inverse, but for a
// factor of 64 that nobody takes away here. Every machine adds the same pairs in the same order.
#pragma once

#include "integer.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int kRunRegisters = kIntegerTileInputs / kLanes;

// In each lane the sum with the lane kDistance further, or the difference from the one kDistance before.
template <int kDistance>
PENSTOCK_INLINE Floats sums_and_differences(Floats a) {
  Floats out;
  if constexpr (kDistance >= kRegisterLanes) {
    constexpr int step = kDistance / kRegisterLanes;
    FOR_PARTS out.part[i] = i & step ? a.part[i ^ step] - a.part[i] : a.part[i] + a.part[i ^ step];
  } else {
    IntRegister partners;
    FloatRegister signs;
    for (int lane = 0; lane < kRegisterLanes; ++lane) {
      partners[lane] = lane ^ kDistance;
      signs[lane] = lane & kDistance ? -1.0f : 1.0f;
    }
    FOR_PARTS out.part[i] = a.part[i] * signs + shuffle(a.part[i], a.part[i], partners);
  }
  return out;
}

PENSTOCK_INLINE void rotate(Floats (&run)[kRunRegisters]) {
  for (int distance = kRunRegisters / 2; distance > 0; distance /= 2) {
    for (int i = 0; i < kRunRegisters; ++i) {
      if (i & distance) continue;
      const Floats low = run[i], high = run[i + distance];
      run[i] = low + high;
      run[i + distance] = low - high;
    }
  }
  for (Floats& some : run) {
    some = sums_and_differences<8>(some);
    some = sums_and_differences<4>(some);
    some = sums_and_differences<2>(some);
    some = sums_and_differences<1>(some);
  }
}

[[maybe_unused]] static void rotate_row(float* row, int64_t num_runs) {
  for (float* at = row; at < row + num_runs * kIntegerTileInputs; at += kIntegerTileInputs) {
    Floats run[kRunRegisters];
    for (int i = 0; i < kRunRegisters; ++i) run[i] = load(at + i * kLanes);
    rotate(run);
    for (int i = 0; i < kRunRegisters; ++i) store(at + i * kLanes, run[i]);
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
