// Sharing a matrix product between threads, and reading embeddings out of packed matrices.
#include "linear.h"

#include <algorithm>

#include "kernels.h"
#include "pool.h"

namespace penstock {
namespace {

// A strip is unpacked once per item, so items get enough rows to pay for it.
constexpr int64_t kMinRowsPerItem = 64;
constexpr int64_t kItemsPerThread = 4;

// Activations in the form `multiply_strip` reads: as they are where possible.
const void* prepare_activations(const Linear& linear, const void* x, int64_t rows, Dtype dtype, int64_t* stride) {
  static thread_local Scratch scratch;
  const int64_t width = linear.in_features;
  *stride = width;
  if (dtype == Dtype::float32) return x;
  const bf16* from = static_cast<const bf16*>(x);
  if (!kernels().bf16_activations) {
    float* to = scratch.get<float>(rows * width);
    parallel_for(ceil_div(rows, 16), [&](int64_t item) {
      const int64_t first = item * 16, count = std::min<int64_t>(16, rows - first);
      kernels().widen(from + first * width, to + first * width, count * width);
    });
    return to;
  }
  if (width % kTileInputs == 0) return x;
  const int64_t padded = linear.num_tiles * kTileInputs;
  bf16* to = scratch.get<bf16>(rows * padded);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy(from + row * width, from + (row + 1) * width, to + row * padded);
    std::fill(to + row * padded + width, to + (row + 1) * padded, bf16{0});
  }
  *stride = padded;
  return to;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

PENSTOCK_API void penstock_linear(const Linear* linear, int dtype, int64_t rows, const void* x, int y_dtype, void* y) {
  LinearCall call = {};
  call.parts = linear->parts.data();
  call.bias = linear->bias.empty() ? nullptr : linear->bias.data();
  call.in_features = linear->in_features;
  call.out_features = linear->out_features;
  call.num_tiles = linear->num_tiles;
  call.x = prepare_activations(*linear, x, rows, static_cast<Dtype>(dtype), &call.x_stride);
  call.y = y;
  call.y_dtype = static_cast<Dtype>(y_dtype);

  const int64_t strips = static_cast<int64_t>(linear->strips.size());
  const int64_t wanted = ceil_div(num_threads() * kItemsPerThread, strips);
  const int64_t row_blocks = std::clamp<int64_t>(wanted, 1, ceil_div(rows, kMinRowsPerItem));
  const int64_t rows_per_item = round_up(ceil_div(rows, row_blocks), 32);
  const auto multiply =
      static_cast<Dtype>(dtype) == Dtype::float32 ? kernels().multiply_strip_f32 : kernels().multiply_strip_bf16;
  parallel_for(strips * row_blocks, [&](int64_t item) {
    const int64_t first = item / strips * rows_per_item;
    if (first < rows) multiply(call, linear->strips[item % strips], first, std::min(rows, first + rows_per_item));
  });
}

// False, and nothing written, when an id is not a row.
PENSTOCK_API int penstock_embed(const Linear* linear, int dtype, int64_t count, const int32_t* ids, void* y) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= linear->out_features) return 0;
  }
  const int64_t width = linear->in_features;
  const int64_t row_bytes = width * (static_cast<Dtype>(dtype) == Dtype::float32 ? 4 : 2);
  const auto embed_one = [&](int64_t i) {
    auto part = linear->parts.begin();
    while (ids[i] >= part->first_output + part->rows) ++part;
    kernels().read_row(*part, ids[i] - part->first_output, width, static_cast<Dtype>(dtype),
                       static_cast<uint8_t*>(y) + i * row_bytes);
  };
  constexpr int64_t tokens_per_item = 16;
  parallel_for(ceil_div(count, tokens_per_item), [&](int64_t item) {
    for (int64_t i = item * tokens_per_item; i < std::min(count, (item + 1) * tokens_per_item); ++i) embed_one(i);
  });
  return 1;
}
