// Sharing a matrix product in whole numbers between threads.
#include "integer.h"

#include <algorithm>

#include "product.h"

namespace penstock {
namespace {

// Rounds the activations of a call to codes, which live until the next call of the thread.
void round_rows(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, IntegerCall* call) {
  static thread_local Scratch made_rows, bytes, words, groups;
  const Kernels& set = kernels();
  const int64_t width = linear.in_features, row_bytes = width * element_bytes(dtype);
  const bool makes = in.origin != InputRows::Origin::given;
  uint8_t* made = makes ? made_rows.get<uint8_t>(rows * row_bytes) : nullptr;
  const uint8_t* x = makes ? made : static_cast<const uint8_t*>(in.data);
  const bool is_few = rows < set.word_rows;
  const auto is_wide = [](const Part& part) { return part.format == Format::int8; };
  const bool any_wide = set.wide_bytes && std::any_of(linear.parts.begin(), linear.parts.end(), is_wide);
  if (is_few) call->bytes = bytes.get<int8_t>(rows * call->row_stride());
  if (!is_few || any_wide) call->words = words.get<int16_t>(rows * call->row_stride() / 2);
  call->groups = groups.get<RoundedGroup>(rows * call->num_tiles);
  for_row_blocks(rows, width, [&](int64_t first, int64_t count) {
    for (int64_t row = first; row < first + count; ++row) {
      if (makes) make_row(in, dtype, width, row, made + row * row_bytes);
      set.round_row(*call, dtype, x + row * row_bytes, width, row);
    }
  }, std::clamp<int64_t>(ceil_div(rows, num_threads()), 1, kPackRows));
}

IntegerCall make_call(const Linear& linear, const OutputRows& out) {
  IntegerCall call = {};
  call.parts = linear.parts.data();
  call.bias = linear.bias.empty() ? nullptr : linear.bias.data();
  call.num_tiles = linear.num_tiles;
  call.out_features = linear.out_features;
  call.y = out.data;
  call.y_dtype = out.dtype;
  call.adds = out.adds;
  return call;
}

// The rows of an item, which every panel reads again, should stay in a core's second-level cache.
constexpr int64_t kItemBytes = 1 << 19;
constexpr int64_t kMinRowsPerItem = 64;
constexpr int64_t kRowsAtOnce = 16;  // engines take rows in blocks whose size divides this
constexpr int64_t kItemsPerThread = 4;
// With this many rows for each thread, rows are shared between threads instead of weights: every thread reads all
// weights, and the rows of a thread stay in the cache of its core from one product to the next.
constexpr int64_t kOwnRows = 64;

struct RowPieces {
  int64_t rows;  // of each but the last
  int64_t count;
  bool owned;    // whether each thread has the same rows in every product
};

RowPieces cut_rows(const IntegerCall& call, int64_t num_groups, int64_t rows) {
  const int64_t threads = num_threads(), row_bytes = call.row_stride();
  const int64_t cached = std::max<int64_t>(kMinRowsPerItem, kItemBytes / row_bytes);
  const bool owned = threads > 1 && rows >= threads * kOwnRows;
  const int64_t wanted = owned ? threads : ceil_div(threads * kItemsPerThread, num_groups);
  int64_t pieces = std::clamp<int64_t>(wanted, 1, ceil_div(rows, kMinRowsPerItem));
  pieces *= ceil_div(ceil_div(rows, pieces), cached);
  const int64_t piece = round_up(ceil_div(rows, pieces), kRowsAtOnce);
  return {piece, ceil_div(rows, piece), owned};
}

// The number of neighbouring panels in an item: two if there are many rows; otherwise enough panels for one long
// stream of memory, but few enough that a thread without a core delays the other threads little.
constexpr int64_t kMostPanelsPerItem = 16;
constexpr int64_t kFewRows = 64;

int64_t panels_per_item(int64_t num_panels, int64_t rows) {
  if (rows > kFewRows) return std::min<int64_t>(num_panels, 2);
  return std::clamp<int64_t>(num_panels / (2 * kItemsPerThread * num_threads()), 1, kMostPanelsPerItem);
}

// body(first panel, number of panels, first row, end row)
template <typename Body>
void for_panels(const IntegerCall& call, int64_t num_panels, int64_t rows, const Body& body) {
  const int64_t group = panels_per_item(num_panels, rows), groups = ceil_div(num_panels, group);
  const RowPieces pieces = cut_rows(call, groups, rows);
  const auto run = [&](int64_t item) {
    const int64_t first = item % groups * group, first_row = item / groups * pieces.rows;
    body(first, std::min(group, num_panels - first), first_row, std::min(rows, first_row + pieces.rows));
  };
  parallel_for(pieces.count * groups, run, pieces.owned ? num_threads() : 1);
}

}  // namespace

void multiply_integers(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, const OutputRows& out) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  IntegerCall call = make_call(linear, out);
  round_rows(linear, dtype, rows, in, &call);
  const Panel* panels = linear.panels.data();
  for_panels(call, static_cast<int64_t>(linear.panels.size()), rows,
             [&](int64_t first, int64_t count, int64_t first_row, int64_t end_row) {
               set.multiply_panels(call, panels + first, count, first_row, end_row);
             });
}

void find_largest_integers(const Linear& linear, Dtype dtype, int64_t rows, const InputRows& in, LargestOutputs* out) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  IntegerCall call = make_call(linear, {});
  round_rows(linear, dtype, rows, in, &call);
  const Panel* panels = linear.panels.data();
  for_panels(call, static_cast<int64_t>(linear.panels.size()), rows,
             [&](int64_t first, int64_t count, int64_t first_row, int64_t end_row) {
               const Panel& last = panels[first + count - 1];
               const ProductPiece piece = {first_row, end_row, panels[first].first_output,
                                           last.first_output + last.num_outputs};
               out->take(call, piece, [&](const IntegerCall& own) {
                 set.multiply_panels(own, panels + first, count, first_row, end_row);
               });
             });
}

bool gates_integers(const Linear& gate_up) {
  const std::vector<Part>& parts = gate_up.parts;
  return gate_up.is_integer() && parts.size() == 2 && parts[0].rows == parts[1].rows && gate_up.bias.empty();
}

void multiply_gated_integers(const Linear& gate_up, Dtype dtype, int64_t rows, const InputRows& in,
                             Activation activation, void* out) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  IntegerCall call = make_call(gate_up, {out, dtype});
  call.out_features = gate_up.out_features / 2;
  round_rows(gate_up, dtype, rows, in, &call);
  const int64_t half = static_cast<int64_t>(gate_up.panels.size()) / 2;
  const Panel* gates = gate_up.panels.data();
  for_panels(call, half, rows, [&](int64_t first, int64_t count, int64_t first_row, int64_t end_row) {
    set.multiply_gated_panels(call, gates + first, gates + half + first, count, activation, first_row, end_row);
  });
}

}  // namespace penstock
