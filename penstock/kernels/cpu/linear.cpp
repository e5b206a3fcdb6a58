// Sharing a matrix product in floating point between threads, and reading embeddings out of packed matrices.
#include "product.h"

#include <algorithm>

#include "pool.h"

namespace penstock {
namespace {

// A strip is unpacked once per item, so items get enough rows to pay for it.
constexpr int64_t kMinRowsPerItem = 64;
constexpr int64_t kItemsPerThread = 4;

// Activations of one item, which every strip reads again, should stay in a core's second-level cache.
constexpr int64_t kItemActivationBytes = 1 << 20;

void pad_row(const bf16* from, int64_t width, int64_t padded, bf16* to) {
  std::copy(from, from + width, to);
  std::fill(to + width, to + padded, bf16{0});
}

void reshape_rows(const LinearCall& call, Activations form, const bf16* from, int64_t first, int64_t count,
                  void* to) {
  const int64_t width = call.in_features, padded = call.num_tiles * kTileInputs;
  if (form == Activations::widened) {
    return kernels().widen(from + first * width, static_cast<float*>(to) + first * width, count * width);
  }
  bf16* narrow = static_cast<bf16*>(to);
  if (form == Activations::tiles) return kernels().pack_activations(call, from, first, count, narrow);
  for (int64_t row = first; row < first + count; ++row) {
    pad_row(from + row * width, width, padded, narrow + row * padded);
  }
}

// Activations in the form `multiply_strip` reads: as they are where possible.
void prepare_activations(const InputRows& in, int64_t rows, Dtype dtype, Activations form, LinearCall* call) {
  static thread_local Scratch made_rows, reshaped_rows;
  if (in.origin == InputRows::Origin::packed) {
    call->x = in.data;
    return;
  }
  const int64_t width = call->in_features, padded = call->num_tiles * kTileInputs;
  const bool makes = in.origin != InputRows::Origin::given;
  const int64_t row_bytes = width * element_bytes(dtype);
  uint8_t* made = makes ? made_rows.get<uint8_t>(rows * row_bytes) : nullptr;
  const void* x = makes ? made : in.data;
  const bool fits = form == Activations::padded_bf16 || (form == Activations::tiles && rows == 1);
  const bool reshapes = dtype == Dtype::bfloat16 && !(fits && width == padded);
  void* reshaped = reshapes ? reshaped_rows.get<float>(rows * padded) : nullptr;
  call->x = reshapes ? reshaped : x;
  call->x_stride = reshapes && form != Activations::widened ? padded : width;
  if (!makes && !reshapes) return;
  for_row_blocks(rows, width, [&](int64_t first, int64_t count) {
    for (int64_t row = first; makes && row < first + count; ++row) {
      make_row(in, dtype, width, row, made + row * row_bytes);
    }
    if (reshapes) reshape_rows(*call, form, static_cast<const bf16*>(x), first, count, reshaped);
  });
}

LinearCall make_call(const Linear& linear, const OutputRows& out) {
  LinearCall call = {};
  call.parts = linear.parts.data();
  call.strips = linear.strips.data();
  call.num_strips = static_cast<int64_t>(linear.strips.size());
  call.strips_at_once = num_threads();
  call.bias = linear.bias.empty() ? nullptr : linear.bias.data();
  call.in_features = linear.in_features;
  call.out_features = linear.out_features;
  call.num_tiles = linear.num_tiles;
  call.y = out.data;
  call.y_dtype = out.dtype;
  call.adds = out.adds;
  return call;
}

// If there are few strips, rows are divided between threads, too. Many rows are taken in pieces that stay in cache.
int64_t rows_per_item(const LinearCall& call, int64_t num_strips, int64_t rows) {
  const int64_t wanted = ceil_div(num_threads() * kItemsPerThread, num_strips);
  const int64_t pieces = std::clamp<int64_t>(wanted, 1, ceil_div(rows, kMinRowsPerItem));
  const int64_t cached = std::max<int64_t>(kMinRowsPerItem, kItemActivationBytes / (call.in_features * 2));
  return round_up(std::min(ceil_div(rows, pieces), cached), 32);
}

// body(strip, first row, end row)
template <typename Body>
void for_strips(const LinearCall& call, int64_t rows, const Body& body) {
  const int64_t piece = rows_per_item(call, call.num_strips, rows);
  parallel_for(ceil_div(rows, piece) * call.num_strips, [&](int64_t item) {
    const int64_t first = item / call.num_strips * piece;
    body(call.strips[item % call.num_strips], first, std::min(rows, first + piece));
  });
}

}  // namespace

int64_t element_bytes(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

void make_row(const InputRows& in, Dtype dtype, int64_t width, int64_t row, void* to) {
  const int64_t row_bytes = width * element_bytes(dtype);
  const uint8_t* from = static_cast<const uint8_t*>(in.data);
  if (in.origin == InputRows::Origin::normed) return kernels().rms_norm(in.norm, from + row * row_bytes, to);
  kernels().gated(dtype, in.activation, width, from + row * 2 * row_bytes, to);
}

void multiply(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, const OutputRows& out) {
  if (rows == 0) return;
  if (linear.is_integer()) return multiply_integers(linear, dtype, rows, in, out);
  const Kernels& set = kernels();
  set.enter();
  LinearCall call = make_call(linear, out);
  const auto multiply_strip = dtype == Dtype::bfloat16 ? set.multiply_strip_bf16 : set.multiply_strip_f32;
  prepare_activations(in, rows, dtype, set.activations, &call);
  for_strips(call, rows, [&](const Strip& strip, int64_t first, int64_t end) {
    multiply_strip(call, strip, first, end);
  });
}

void find_largest(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, LargestOutputs* out) {
  if (rows == 0) return;
  if (linear.is_integer()) return find_largest_integers(linear, dtype, rows, in, out);
  const Kernels& set = kernels();
  set.enter();
  LinearCall call = make_call(linear, {});
  const auto multiply_strip = dtype == Dtype::bfloat16 ? set.multiply_strip_bf16 : set.multiply_strip_f32;
  prepare_activations(in, rows, dtype, set.activations, &call);
  for_strips(call, rows, [&](const Strip& strip, int64_t first, int64_t end) {
    const ProductPiece piece = {first, end, strip.first_output, strip.first_output + strip.num_outputs};
    out->take(call, piece, [&](const LinearCall& own) { multiply_strip(own, strip, first, end); });
  });
}

bool gates_on_the_way(const Linear& gate_up, Dtype dtype, int64_t rows) {
  const std::vector<Part>& parts = gate_up.parts;
  const bool side_by_side = parts.size() == 2 && parts[0].rows == parts[1].rows &&
                            parts[0].rows % (kStripPanels * kPanelOutputs) == 0;
  return side_by_side && rows >= kPackRows && dtype == Dtype::bfloat16 && kernels().multiply_gated != nullptr &&
         gate_up.bias.empty();
}

void multiply_gated(const Linear& gate_up, int64_t rows, const InputRows& in, Activation activation, bf16* out) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  LinearCall call = make_call(gate_up, {out, Dtype::bfloat16});
  prepare_activations(in, rows, Dtype::bfloat16, set.activations, &call);
  const int64_t pairs = call.num_strips / 2, piece = rows_per_item(call, pairs, rows);
  parallel_for(ceil_div(rows, piece) * pairs, [&](int64_t item) {
    const Strip* gate = call.strips + item % pairs;
    const int64_t first = item / pairs * piece;
    set.multiply_gated(call, *gate, gate[pairs], activation, first, std::min(rows, first + piece));
  });
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API void penstock_linear(const Linear* linear, int dtype, int64_t rows, const void* x, int y_dtype, void* y) {
  multiply(*linear, static_cast<Dtype>(dtype), rows, InputRows::given(x), {y, static_cast<Dtype>(y_dtype)});
}

// False, and nothing written, when an id is not a row.
PENSTOCK_API int penstock_embed(const Linear* linear, int dtype, int64_t count, const int32_t* ids, void* y) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= linear->out_features) return 0;
  }
  const int64_t width = linear->in_features;
  const int64_t row_bytes = width * element_bytes(static_cast<Dtype>(dtype));
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
