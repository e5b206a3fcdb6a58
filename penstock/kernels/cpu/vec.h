// Sixteen lanes of float or int32, whatever the register width. Compiled once per instruction set: the including file
// defines PENSTOCK_ISA (a namespace) and PENSTOCK_REGISTER_BYTES, and has set the compiler's target. Uses no function
// of the standard library's templates, whose instances the linker could share between instruction sets.
#pragma once

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "common.h"

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

namespace penstock {
namespace PENSTOCK_ISA {

constexpr int kLanes = 16;
constexpr int kRegisterLanes = PENSTOCK_REGISTER_BYTES / 4;
constexpr int kRegisters = kLanes / kRegisterLanes;

typedef float FloatRegister __attribute__((vector_size(PENSTOCK_REGISTER_BYTES)));
typedef int32_t IntRegister __attribute__((vector_size(PENSTOCK_REGISTER_BYTES)));
typedef uint32_t UintRegister __attribute__((vector_size(PENSTOCK_REGISTER_BYTES)));
typedef uint16_t ShortRegister __attribute__((vector_size(PENSTOCK_REGISTER_BYTES / 2)));
typedef int8_t ByteRegister __attribute__((vector_size(PENSTOCK_REGISTER_BYTES / 4)));

struct Floats {
  FloatRegister part[kRegisters];
};
struct Ints {
  IntRegister part[kRegisters];
};

// Without unrolling, GCC keeps vectors of four registers in memory.
#define FOR_PARTS _Pragma("GCC unroll 4") for (int i = 0; i < kRegisters; ++i)

PENSTOCK_INLINE Floats broadcast(float value) {
  Floats out;
  FOR_PARTS out.part[i] = value - FloatRegister{};  // x + 0 is no copy: it would turn -0 into 0
  return out;
}

PENSTOCK_INLINE Ints broadcast_int(int32_t value) {
  Ints out;
  FOR_PARTS out.part[i] = IntRegister{} + value;
  return out;
}

PENSTOCK_INLINE Floats zeros() { return broadcast(0.0f); }

PENSTOCK_INLINE Ints lane_indices() {
  alignas(64) int32_t index[kLanes];
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  Ints out;
  memcpy(&out, index, sizeof out);
  return out;
}

PENSTOCK_INLINE Floats as_floats(Ints a) {
  Floats out;
  FOR_PARTS out.part[i] = (FloatRegister)a.part[i];
  return out;
}

PENSTOCK_INLINE Ints as_ints(Floats a) {
  Ints out;
  FOR_PARTS out.part[i] = (IntRegister)a.part[i];
  return out;
}

PENSTOCK_INLINE Floats to_floats(Ints a) {
  Floats out;
  FOR_PARTS out.part[i] = __builtin_convertvector(a.part[i], FloatRegister);
  return out;
}

#define PENSTOCK_FLOAT_OPERATOR(op)                     \
  PENSTOCK_INLINE Floats operator op(Floats a, Floats b) { \
    Floats out;                                         \
    FOR_PARTS out.part[i] = a.part[i] op b.part[i];     \
    return out;                                         \
  }
PENSTOCK_FLOAT_OPERATOR(+)
PENSTOCK_FLOAT_OPERATOR(-)
PENSTOCK_FLOAT_OPERATOR(*)
PENSTOCK_FLOAT_OPERATOR(/)
#undef PENSTOCK_FLOAT_OPERATOR

// a * b + c with one rounding. Left to the compiler, GCC 13 and later fuse some links of a chain of additions and not
// others, and the bits of a row would depend on the number of rows in the loop.
PENSTOCK_INLINE FloatRegister fused_multiply_add(FloatRegister a, FloatRegister b, FloatRegister c) {
#if PENSTOCK_REGISTER_BYTES == 64
  return (FloatRegister)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif PENSTOCK_REGISTER_BYTES == 32
  return (FloatRegister)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (FloatRegister)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;  // the baseline of x86-64 has no fused product
#endif
}

PENSTOCK_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  Floats out;
  FOR_PARTS out.part[i] = fused_multiply_add(a.part[i], b.part[i], c.part[i]);
  return out;
}

PENSTOCK_INLINE Floats maximum(Floats a, Floats b) {
  Floats out;
  FOR_PARTS out.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return out;
}

PENSTOCK_INLINE Ints operator&(Ints a, Ints b) {
  Ints out;
  FOR_PARTS out.part[i] = a.part[i] & b.part[i];
  return out;
}

PENSTOCK_INLINE Ints operator|(Ints a, Ints b) {
  Ints out;
  FOR_PARTS out.part[i] = a.part[i] | b.part[i];
  return out;
}

PENSTOCK_INLINE Ints is_nan(Floats a) {
  Ints out;
  FOR_PARTS out.part[i] = a.part[i] != a.part[i];
  return out;
}

PENSTOCK_INLINE Floats zero_below(Floats a, float lowest) {
  Floats out;
  FOR_PARTS out.part[i] = a.part[i] < lowest ? FloatRegister{} : a.part[i];
  return out;
}

PENSTOCK_INLINE Ints operator+(Ints a, Ints b) {
  Ints out;
  FOR_PARTS out.part[i] = a.part[i] + b.part[i];
  return out;
}

PENSTOCK_INLINE Ints operator*(Ints a, Ints b) {
  Ints out;
  FOR_PARTS out.part[i] = a.part[i] * b.part[i];
  return out;
}

PENSTOCK_INLINE Ints shift_left(Ints a, int bits) {
  Ints out;
  FOR_PARTS out.part[i] = (IntRegister)((UintRegister)a.part[i] << bits);
  return out;
}

PENSTOCK_INLINE Ints shift_right(Ints a, int bits) {
  Ints out;
  FOR_PARTS out.part[i] = (IntRegister)((UintRegister)a.part[i] >> bits);
  return out;
}

PENSTOCK_INLINE Ints shift_right_signed(Ints a, int bits) {
  Ints out;
  FOR_PARTS out.part[i] = a.part[i] >> bits;
  return out;
}

// Register by register: GCC copies a whole struct of four through the stack.
PENSTOCK_INLINE FloatRegister load_register(const float* from) {
  FloatRegister out;
  memcpy(&out, from, sizeof out);
  return out;
}

PENSTOCK_INLINE void store_register(float* to, FloatRegister a) { memcpy(to, &a, sizeof a); }

PENSTOCK_INLINE Floats load(const float* from) {
  Floats out;
  FOR_PARTS out.part[i] = load_register(from + i * kRegisterLanes);
  return out;
}

PENSTOCK_INLINE Ints load_ints(const void* from) {
  Ints out;
  FOR_PARTS memcpy(&out.part[i], static_cast<const uint8_t*>(from) + i * PENSTOCK_REGISTER_BYTES, sizeof out.part[i]);
  return out;
}

PENSTOCK_INLINE void store(float* to, Floats a) {
  FOR_PARTS store_register(to + i * kRegisterLanes, a.part[i]);
}

// Lanes of a followed by b, chosen by constants. Only Clang lacks the first form.
PENSTOCK_INLINE FloatRegister shuffle(FloatRegister a, FloatRegister b, IntRegister lanes) {
#if !defined(__clang__)
  return __builtin_shuffle(a, b, lanes);
#else
  FloatRegister out;
  for (int i = 0; i < kRegisterLanes; ++i) {
    out[i] = lanes[i] < kRegisterLanes ? a[lanes[i]] : b[lanes[i] - kRegisterLanes];
  }
  return out;
#endif
}

// kFirst, kFirst + kStep, ...: a constant. Filled in a loop, GCC would put it together lane by lane at run time.
template <int kFirst, int kStep, int... kLane>
PENSTOCK_INLINE IntRegister make_lanes(std::integer_sequence<int, kLane...>) {
  return IntRegister{(kFirst + kStep * kLane)...};
}
template <int kFirst, int kStep>
PENSTOCK_INLINE IntRegister lanes() {
  return make_lanes<kFirst, kStep>(std::make_integer_sequence<int, kRegisterLanes>());
}

// Lanes 0, 2, 4, ... (or 1, 3, 5, ...) of a followed by those of b.
template <int kOdd>
PENSTOCK_INLINE Floats every_second(Floats a, Floats b) {
  FloatRegister source[2 * kRegisters];
  FOR_PARTS {
    source[i] = a.part[i];
    source[kRegisters + i] = b.part[i];
  }
  Floats out;
  FOR_PARTS out.part[i] = shuffle(source[2 * i], source[2 * i + 1], lanes<kOdd, 2>());
  return out;
}

// Two bf16 in each 32-bit lane, widened: the lower halves, the upper halves.
PENSTOCK_INLINE Floats low_halves(Ints pairs) { return as_floats(shift_left(pairs, 16)); }
PENSTOCK_INLINE Floats high_halves(Ints pairs) {
  return as_floats(pairs & broadcast_int(static_cast<int32_t>(0xffff0000u)));
}

// The sums of four vectors, all summed in the same order.
PENSTOCK_INLINE void reduce_four(Floats a, Floats b, Floats c, Floats d, float* to) {
  const Floats left = every_second<0>(a, b) + every_second<1>(a, b);
  const Floats right = every_second<0>(c, d) + every_second<1>(c, d);
  alignas(64) float lanes[kLanes];
  store(lanes, every_second<0>(left, right) + every_second<1>(left, right));
  for (int i = 0; i < 4; ++i) to[i] = (lanes[4 * i] + lanes[4 * i + 1]) + (lanes[4 * i + 2] + lanes[4 * i + 3]);
}

template <int kWidth, typename Combine>
PENSTOCK_INLINE FloatRegister fold(FloatRegister a, const Combine& combine) {
  if constexpr (kWidth == 0) {
    return a;
  } else {
    return fold<kWidth / 2>(combine(a, shuffle(a, a, lanes<kWidth, 1>())), combine);
  }
}

// Lane i with lane i + 8, then with i + 4, i + 2 and i + 1, on every machine.
template <typename Combine>
PENSTOCK_INLINE float reduce(Floats a, const Combine& combine) {
#pragma GCC unroll 4
  for (int count = kRegisters / 2; count > 0; count /= 2) {
    for (int i = 0; i < count; ++i) a.part[i] = combine(a.part[i], a.part[i + count]);
  }
  return fold<kRegisterLanes / 2>(a.part[0], combine)[0];
}

PENSTOCK_INLINE float reduce_sum(Floats a) {
  return reduce(a, [](FloatRegister x, FloatRegister y) { return x + y; });
}

PENSTOCK_INLINE float reduce_max(Floats a) {
  return reduce(a, [](FloatRegister x, FloatRegister y) { return x > y ? x : y; });
}

// Lane i of the result is a's where first <= start + i < end, else `other`.
PENSTOCK_INLINE Floats keep_between(Floats a, Ints lane_index, int64_t start, int64_t first, int64_t end,
                                    float other) {
  const int32_t low = static_cast<int32_t>(first - start), high = static_cast<int32_t>(end - start);
  Floats out;
  FOR_PARTS {
    const IntRegister inside = (lane_index.part[i] >= low) & (lane_index.part[i] < high);
    out.part[i] = inside ? a.part[i] : FloatRegister{} + other;
  }
  return out;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock

#include "vec_convert.h"
