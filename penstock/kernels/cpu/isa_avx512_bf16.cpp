// AVX-512 with bfloat16 dot products.
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

template <int kRows>
static void dot_rows(const LinearCall& call, const uint8_t* const* panels, const bf16* x, float* out) {
  __m512 sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < call.num_tiles * kTileInputs / 2; ++pair) {
    const __m512bh left = (__m512bh)_mm512_loadu_si512(panels[0] + pair * 64);
    const __m512bh right = (__m512bh)_mm512_loadu_si512(panels[1] + pair * 64);
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      memcpy(&both, x + r * call.x_stride + 2 * pair, sizeof both);
      const __m512bh activation = (__m512bh)_mm512_set1_epi32(both);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], activation, left);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], activation, right);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    _mm512_store_ps(out + r * 32, sum[r][0]);
    _mm512_store_ps(out + r * 32 + 16, sum[r][1]);
  }
}

static void dot_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  constexpr int64_t rows_at_once = 8;
  alignas(64) float out[rows_at_once * 32];
  const uint8_t* panels[kStripPanels];
  unpack_strip(call, strip, scratch, panels);
  if (strip.num_panels == 1) panels[1] = panels[0];
  for (int64_t row = first_row; row < end_row; row += rows_at_once) {
    const bf16* x = static_cast<const bf16*>(call.x) + row * call.x_stride;
    const int64_t rows = end_row - row < rows_at_once ? end_row - row : rows_at_once;
    if (rows == rows_at_once) {
      dot_rows<rows_at_once>(call, panels, x, out);
    } else {
      for (int64_t r = 0; r < rows; ++r) dot_rows<1>(call, panels, x + r * call.x_stride, out + r * 32);
    }
    for (int64_t r = 0; r < rows; ++r) write_strip_row(call, strip, row + r, out + r * 32);
  }
}

}  // namespace avx512_bf16
}  // namespace penstock

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::avx512_bf16_kernels() {
  static const Kernels table = [] {
    Kernels made = avx512_bf16::make_table();
    made.multiply_strip_bf16 = avx512_bf16::dot_strip;
    made.bf16_activations = true;
    return made;
  }();
  return &table;
}

#else

const penstock::Kernels* penstock::avx512_bf16_kernels() { return nullptr; }

#endif
