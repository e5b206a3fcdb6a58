// AVX-512 with dot products of bfloat16 and of bytes. Products in whole numbers are those of the smaller set.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c")

#define PENSTOCK_ISA avx512_bf16
#define PENSTOCK_REGISTER_BYTES 64
#define PENSTOCK_NATIVE_BF16
#include "table_impl.h"
#include "unpack_bf16.h"

namespace penstock {
namespace avx512_bf16 {

// As multiply_block of linear_impl.h, two inputs a lane.
template <int kOutputs, int kRows>
static void dot_block(const uint8_t* panel, int64_t step, int64_t num_tiles, const bf16* x, int64_t x_stride,
                      float* sums) {
  __m512 sum[kOutputs * kRows];
  for (int i = 0; i < kOutputs * kRows; ++i) sum[i] = _mm512_setzero_ps();
  for (int64_t t = 0; t < num_tiles; ++t) {
    __m512bh activation[kRows];
    for (int r = 0; r < kRows; ++r) {
      activation[r] = (__m512bh)_mm512_loadu_si512(x + r * x_stride + t * kTileInputs);
    }
    for (int o = 0; o < kOutputs; ++o) {
      const __m512bh weight = (__m512bh)_mm512_loadu_si512(panel + t * step + o * 64);
      for (int r = 0; r < kRows; ++r) {
        sum[o * kRows + r] = _mm512_dpbf16_ps(sum[o * kRows + r], weight, activation[r]);
      }
    }
  }
  float flat[kOutputs * kRows];
  for (int i = 0; i < kOutputs * kRows; i += 4) {
    Floats four[4];
    for (int j = 0; j < 4; ++j) four[j].part[0] = (FloatRegister)sum[i + j];
    reduce_four(four[0], four[1], four[2], four[3], flat + i);
  }
  for (int o = 0; o < kOutputs; ++o)
    for (int r = 0; r < kRows; ++r) sums[r * kPanelOutputs + o] = flat[o * kRows + r];
}

static void dot_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  const Part& part = call.parts[strip.part];
  for (int32_t p = 0; p < strip.num_panels; ++p) {
    const uint8_t* panel = part.panel(strip.first_panel + p);
    int64_t step = part.tile_step(strip.first_panel + p);
    if (part.format != Format::bfloat16) {
      uint8_t* unpacked = scratch.get<uint8_t>(call.num_tiles * kBf16TileBytes);
      for (int64_t t = 0; t < call.num_tiles; ++t) {
        unpack_tile(part, panel + t * step, unpacked + t * kBf16TileBytes);
      }
      panel = unpacked;
      step = kBf16TileBytes;
    }
    alignas(64) float sums[4 * kPanelOutputs];
    int64_t rows = 4;
    for (int64_t row = first_row; row < end_row; row += rows) {
      const bf16* x = static_cast<const bf16*>(call.x) + row * call.x_stride;
      rows = end_row - row < 4 ? 1 : 4;
      for (int o = 0; o < kPanelOutputs; o += 4) {
        if (rows == 1) {
          dot_block<4, 1>(panel + o * 64, step, call.num_tiles, x, call.x_stride, sums + o);
        } else {
          dot_block<4, 4>(panel + o * 64, step, call.num_tiles, x, call.x_stride, sums + o);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t left = strip.num_outputs - p * kPanelOutputs;
        write_strip_row(call, row + r, strip.first_output + p * kPanelOutputs,
                        left < kPanelOutputs ? left : kPanelOutputs, _mm512_load_ps(sums + r * kPanelOutputs),
                        _mm512_setzero_ps());
      }
    }
  }
}

}  // namespace avx512_bf16
}  // namespace penstock

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::avx512_bf16_kernels() {
  static const Kernels table = [] {
    Kernels made = avx512_bf16::make_table();
    made.multiply_strip_bf16 = avx512_bf16::dot_strip;
    made.activations = Activations::padded_bf16;
    const Kernels& integers = *avx512_vnni_kernels();
    made.word_rows = integers.word_rows;
    made.wide_bytes = integers.wide_bytes;
    made.multiply_panels = integers.multiply_panels;
    made.multiply_gated_panels = integers.multiply_gated_panels;
    made.fast_integers = integers.fast_integers;
    return made;
  }();
  return &table;
}

#else

const penstock::Kernels* penstock::avx512_bf16_kernels() { return nullptr; }

#endif
