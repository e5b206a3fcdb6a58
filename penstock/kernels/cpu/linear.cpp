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

constexpr int64_t kPackRows = 16;
// From here on turning weights is cheaper than turning activations and results.
constexpr int64_t kWideRows = 96;
// Activations of one item, which every strip reads again, should stay in a core's second-level cache.
constexpr int64_t kItemActivationBytes = 1 << 20;
constexpr int64_t kSerialElements = 16384;

// body(first row, number of rows) for every 16 rows.
template <typename Body>
void for_row_blocks(int64_t rows, int64_t width, Body&& body) {
  const auto one = [&](int64_t block) {
    body(block * kPackRows, std::min(kPackRows, rows - block * kPackRows));
  };
  const int64_t blocks = ceil_div(rows, kPackRows);
  if (rows * width > kSerialElements) return parallel_for(blocks, one);
  for (int64_t block = 0; block < blocks; ++block) one(block);
}

void pad_row(const bf16* from, int64_t width, int64_t padded, bf16* to) {
  std::copy(from, from + width, to);
  std::fill(to + width, to + padded, bf16{0});
}

// Activations in the form `multiply_strip` reads: as they are where possible.
void prepare_activations(const void* x, int64_t rows, Dtype dtype, Activations form, LinearCall* call) {
  static thread_local Scratch scratch;
  const int64_t width = call->in_features, padded = call->num_tiles * kTileInputs;
  call->x = x;
  call->x_stride = width;
  if (dtype == Dtype::float32) return;
  const bf16* from = static_cast<const bf16*>(x);
  if (form == Activations::widened) {
    float* to = scratch.get<float>(rows * width);
    for_row_blocks(rows, width, [&](int64_t first, int64_t count) {
      kernels().widen(from + first * width, to + first * width, count * width);
    });
    call->x = to;
    return;
  }
  const bool as_it_is = width == padded && (form == Activations::padded_bf16 || rows == 1);
  if (as_it_is) return;
  bf16* to = scratch.get<bf16>(rows * padded);
  for_row_blocks(rows, width, [&](int64_t first, int64_t count) {
    if (form == Activations::tiles) return kernels().pack_activations(*call, from, first, count, to);
    for (int64_t row = first; row < first + count; ++row) pad_row(from + row * width, width, padded, to + row * padded);
  });
  call->x = to;
  call->x_stride = padded;
}

LinearCall make_call(const Linear& linear, void* y, Dtype y_dtype) {
  LinearCall call = {};
  call.parts = linear.parts.data();
  call.strips = linear.strips.data();
  call.num_strips = static_cast<int64_t>(linear.strips.size());
  call.strips_at_once = num_threads();
  call.bias = linear.bias.empty() ? nullptr : linear.bias.data();
  call.in_features = linear.in_features;
  call.out_features = linear.out_features;
  call.num_tiles = linear.num_tiles;
  call.y = y;
  call.y_dtype = y_dtype;
  return call;
}

// Few strips are shared out by rows too; many rows are taken in pieces that stay in cache.
int64_t rows_per_item(const LinearCall& call, int64_t rows) {
  const int64_t wanted = ceil_div(num_threads() * kItemsPerThread, call.num_strips);
  const int64_t pieces = std::clamp<int64_t>(wanted, 1, ceil_div(rows, kMinRowsPerItem));
  const int64_t cached = std::max<int64_t>(kMinRowsPerItem, kItemActivationBytes / (call.in_features * 2));
  return round_up(std::min(ceil_div(rows, pieces), cached), 32);
}

}  // namespace
}  // namespace penstock

using namespace penstock;

PENSTOCK_API void penstock_linear(const Linear* linear, int dtype, int64_t rows, const void* x, int y_dtype, void* y) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  LinearCall call = make_call(*linear, y, static_cast<Dtype>(y_dtype));
  auto multiply = set.multiply_strip_f32;
  Activations form = set.activations;
  if (static_cast<Dtype>(dtype) == Dtype::bfloat16) {
    const bool wide = rows >= kWideRows && set.multiply_strip_wide != nullptr;
    multiply = wide ? set.multiply_strip_wide : set.multiply_strip_bf16;
    if (wide) form = Activations::padded_bf16;
  }
  prepare_activations(x, rows, static_cast<Dtype>(dtype), form, &call);
  const int64_t piece = rows_per_item(call, rows);
  parallel_for(ceil_div(rows, piece) * call.num_strips, [&](int64_t item) {
    const int64_t first = item / call.num_strips * piece;
    multiply(call, call.strips[item % call.num_strips], first, std::min(rows, first + piece));
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
