// Loads and stores that convert between elements of different sizes. A part of vec.h, which includes this file.
#pragma once

#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Compilers convert between elements of different sizes well up to 32 bytes, and badly beyond.
PENSTOCK_INLINE IntRegister widen_words(ShortRegister words) {
#if PENSTOCK_REGISTER_BYTES == 64
  return (IntRegister)_mm512_cvtepu16_epi32((__m256i)words);
#else
  return __builtin_convertvector(words, IntRegister);
#endif
}

PENSTOCK_INLINE Ints load_words(const uint16_t* from) {
  Ints out;
  FOR_PARTS {
    ShortRegister half;
    memcpy(&half, from + i * kRegisterLanes, sizeof half);
    out.part[i] = widen_words(half);
  }
  return out;
}

PENSTOCK_INLINE FloatRegister load_register(const bf16* from) {
  ShortRegister half;
  memcpy(&half, from, sizeof half);
#if defined(__aarch64__)  // half as long as two shifts
  const uint16x8_t words = vcombine_u16((uint16x4_t)half, vcreate_u16(0));
  return (FloatRegister)vzip1q_u16(vdupq_n_u16(0), words);
#else
  return (FloatRegister)((UintRegister)widen_words(half) << 16);
#endif
}

PENSTOCK_INLINE Floats load(const bf16* from) {
  Floats out;
  FOR_PARTS out.part[i] = load_register(from + i * kRegisterLanes);
  return out;
}

PENSTOCK_INLINE Floats load_bytes(const int8_t* from) {
  Floats out;
  FOR_PARTS {
    ByteRegister bytes;
    memcpy(&bytes, from + i * kRegisterLanes, sizeof bytes);
#if PENSTOCK_REGISTER_BYTES == 64
    const IntRegister wide = (IntRegister)_mm512_cvtepi8_epi32((__m128i)bytes);
#else
    const IntRegister wide = __builtin_convertvector(bytes, IntRegister);
#endif
    out.part[i] = __builtin_convertvector(wide, FloatRegister);
  }
  return out;
}

// Finite IEEE halves. Without an instruction, shifting places exponent and fraction; the product corrects the
// exponent's bias, and is exact for subnormals too.
PENSTOCK_INLINE Floats load_halves(const uint16_t* from) {
  Floats out;
  FOR_PARTS {
    ShortRegister half;
    memcpy(&half, from + i * kRegisterLanes, sizeof half);
#if PENSTOCK_REGISTER_BYTES == 64
    out.part[i] = (FloatRegister)_mm512_cvtph_ps((__m256i)half);
#elif PENSTOCK_REGISTER_BYTES == 32
    out.part[i] = (FloatRegister)_mm256_cvtph_ps((__m128i)half);
#elif defined(__aarch64__)
    out.part[i] = (FloatRegister)vcvt_f32_f16((float16x4_t)half);
#else
    const UintRegister bits = __builtin_convertvector(half, UintRegister);
    const FloatRegister magnitude = (FloatRegister)((bits & 0x7fff) << 13) * 0x1p112f;
    out.part[i] = (FloatRegister)((UintRegister)magnitude | ((bits & 0x8000) << 16));
#endif
  }
  return out;
}

PENSTOCK_INLINE void store(bf16* to, Floats a) {
  FOR_PARTS {
#ifdef PENSTOCK_NATIVE_BF16
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)a.part[i]);
#else
    const UintRegister bits = (UintRegister)a.part[i];
    const UintRegister rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const UintRegister quiet_nan = (bits >> 16) | 0x40;
    const UintRegister selected = a.part[i] == a.part[i] ? rounded : quiet_nan;
    const ShortRegister narrow = __builtin_convertvector(selected, ShortRegister);
#endif
    memcpy(to + i * kRegisterLanes, &narrow, sizeof narrow);
  }
}

// Stores `first`, then `second`.
PENSTOCK_INLINE void store_two(float* to, Floats first, Floats second) {
  store(to, first);
  store(to + kLanes, second);
}

PENSTOCK_INLINE void store_two(bf16* to, Floats first, Floats second) {
#ifdef PENSTOCK_NATIVE_BF16
  const __m512bh narrow = _mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
  memcpy(to, &narrow, sizeof narrow);
#else
  store(to, first);
  store(to + kLanes, second);
#endif
}

// Stores the elements alternately: element 0 of `first`, element 0 of `second`, element 1 of `first`, ...
PENSTOCK_INLINE void store_by_turns(bf16* to, Floats first, Floats second) {
#ifdef PENSTOCK_NATIVE_BF16
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
#else
  FOR_PARTS {
    const UintRegister low = (UintRegister)first.part[i], high = (UintRegister)second.part[i];
    const UintRegister low_rounded = (low + 0x7fff + ((low >> 16) & 1)) >> 16;
    const UintRegister high_rounded = (high + 0x7fff + ((high >> 16) & 1)) & 0xffff0000u;
    const UintRegister pairs = low_rounded | high_rounded;
    memcpy(to + i * 2 * kRegisterLanes, &pairs, sizeof pairs);
  }
#endif
}

// The lowest byte of each lane.
PENSTOCK_INLINE void store_bytes(uint8_t* to, Ints a) {
  FOR_PARTS {
#if PENSTOCK_REGISTER_BYTES == 64
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)a.part[i]);
#else
    const ByteRegister bytes = __builtin_convertvector(a.part[i], ByteRegister);
#endif
    memcpy(to + i * kRegisterLanes, &bytes, sizeof bytes);
  }
}

// The lower half of each lane.
PENSTOCK_INLINE void store_words(int16_t* to, Ints a) {
  FOR_PARTS {
#if PENSTOCK_REGISTER_BYTES == 64
    const __m256i words = _mm512_cvtepi32_epi16((__m512i)a.part[i]);
#else
    const ShortRegister words = __builtin_convertvector((UintRegister)a.part[i], ShortRegister);
#endif
    memcpy(to + i * kRegisterLanes, &words, sizeof words);
  }
}

// The first `count` lanes only; the others read as zero and are not written.
template <typename T>
PENSTOCK_INLINE Floats load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T buffer[kLanes] = {};
  memcpy(buffer, from, static_cast<size_t>(count) * sizeof(T));
  return load(buffer);
}

template <typename T>
PENSTOCK_INLINE void store_some(T* to, Floats a, int64_t count) {
  if (count >= kLanes) return store(to, a);
  T buffer[kLanes];
  store(buffer, a);
  memcpy(to, buffer, static_cast<size_t>(count) * sizeof(T));
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
