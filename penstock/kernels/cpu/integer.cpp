// Sharing a matrix product in whole numbers between threads.
#include "integer.h"

#include <algorithm>

#include "product.h"

namespace penstock {
namespace {

// One item's rows, which every pair of panels reads again, should stay in a core's second-level cache.
constexpr int64_t kItemBytes = 1 << 20;
constexpr int64_t kMinRowsPerItem = 64;
constexpr int64_t kItemsPerThread = 4;

// The codes live until the thread's next call.
void round_rows(const Linear& linear, int64_t rows, const InputRows& in, IntegerCall* call) {
  static thread_local Scratch made_rows, codes, scales;
  const int64_t width = linear.in_features, num_blocks = ceil_div(rows, kIntegerBlockRows);
  const bool makes = in.origin != InputRows::Origin::given;
  bf16* made = makes ? made_rows.get<bf16>(rows * width) : nullptr;
  const bf16* x = makes ? made : static_cast<const bf16*>(in.data);
  call->codes = codes.get<uint8_t>(num_blocks * call->num_tiles * kCodesTileBytes);
  call->row_scales = scales.get<float>(rows);
  for_row_blocks(rows, width, [&](int64_t first, int64_t count) {
    for (int64_t row = first; row < first + count; ++row) {
      if (makes) make_row(in, Dtype::bfloat16, width, row, made + row * width);
      kernels().round_row(*call, x + row * width, width, row);
    }
  }, std::clamp<int64_t>(ceil_div(rows, num_threads()), 1, kPackRows));
}

IntegerCall make_call(const Linear& linear, const OutputRows& out) {
  IntegerCall call = {};
  call.bias = linear.bias.empty() ? nullptr : linear.bias.data();
  call.num_tiles = linear.parts.front().num_tiles;
  call.out_features = linear.out_features;
  call.y = out.data;
  call.y_dtype = out.dtype;
  call.adds = out.adds;
  return call;
}

// From this many rows for each thread, a thread keeps to its rows and reads all weights, rather than to its weights:
// the rows stay in its cache from one product to the next.
constexpr int64_t kOwnRows = 64;

struct RowPieces {
  int64_t rows;   // of each but the last
  int64_t count;
  bool owned;     // whether each thread has the same rows in every product
};

RowPieces cut_rows(const IntegerCall& call, int64_t num_pairs, int64_t rows) {
  const int64_t threads = num_threads(), row_bytes = call.num_tiles * kIntegerTileInputs;
  const int64_t cached = std::max<int64_t>(kMinRowsPerItem, kItemBytes / row_bytes);
  const bool owned = threads > 1 && rows >= threads * kOwnRows;
  const int64_t wanted = owned ? threads : ceil_div(threads * kItemsPerThread, num_pairs);
  const int64_t most = ceil_div(rows, kMinRowsPerItem);
  int64_t pieces = std::clamp<int64_t>(wanted, 1, most);
  pieces *= ceil_div(ceil_div(rows, pieces), cached);
  const int64_t piece = round_up(ceil_div(rows, pieces), kRowsAtOnce);
  return {piece, ceil_div(rows, piece), owned};
}

// Which panels are multiplied side by side: i * step and i * step + second, for every i < count.
struct Pairing {
  int64_t count;
  int64_t step;
  int64_t second;

  PanelPair pair(const std::vector<Panel>& panels, int64_t index, int64_t next) const {
    const int64_t num_panels = static_cast<int64_t>(panels.size());
    PanelPair made = {};
    for (int p = 0; p < 2; ++p) {
      const int64_t panel = index * step + p * second, next_panel = next * step + p * second;
      if (panel < num_panels) made.panel[p] = &panels[panel];
      made.next[p] = panels[std::min(next_panel, num_panels - 1)].tiles;
    }
    return made;
  }
};

Pairing neighbours(const Linear& linear) {
  return {ceil_div(static_cast<int64_t>(linear.panels.size()), 2), 2, 1};
}

// How many neighbouring pairs make an item: one where many rows fill the time, else enough to make one long stream of
// memory, but not so many that a thread which lost its core holds up the rest.
constexpr int64_t kMostPairsPerItem = 8;
constexpr int64_t kFewRows = 64;

int64_t pairs_per_item(const Pairing& pairing, int64_t rows) {
  // Two pairs of gates and ups write to the same lines of memory.
  if (rows > kFewRows) return std::min<int64_t>(pairing.count, pairing.step == 1 ? 2 : 1);
  return std::clamp<int64_t>(pairing.count / (2 * kItemsPerThread * num_threads()), 1, kMostPairsPerItem);
}

// body(pairs, number of pairs, first row, end row)
template <typename Body>
void for_pairs(const IntegerCall& call, const Linear& linear, const Pairing& pairing, int64_t rows, const Body& body) {
  const int64_t group = pairs_per_item(pairing, rows), groups = ceil_div(pairing.count, group);
  const RowPieces pieces = cut_rows(call, groups, rows);
  const int64_t skipped = pieces.owned ? 0 : (num_threads() - 1) * group;  // by the thread: others take them meanwhile
  const auto run = [&](int64_t item) {
    const int64_t first = item % groups * group, count = std::min(group, pairing.count - first);
    const int64_t first_row = item / groups * pieces.rows;
    PanelPair pairs[kMostPairsPerItem];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t next = first + i + 1 + (i + 1 < count ? 0 : skipped);
      pairs[i] = pairing.pair(linear.panels, first + i, next < pairing.count ? next : first + i);
    }
    body(pairs, count, first_row, std::min(rows, first_row + pieces.rows));
  };
  parallel_for(pieces.count * groups, run, pieces.owned ? num_threads() : 1);
}

}  // namespace

void multiply_integers(const Linear& linear, int64_t rows, const InputRows& in, const OutputRows& out) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  IntegerCall call = make_call(linear, out);
  round_rows(linear, rows, in, &call);
  const auto run = [&](const PanelPair* pairs, int64_t num_pairs, int64_t first_row, int64_t end_row) {
    set.multiply_panels(call, pairs, num_pairs, first_row, end_row);
  };
  for_pairs(call, linear, neighbours(linear), rows, run);
}

void find_largest_integers(const Linear& linear, int64_t rows, const InputRows& in, LargestOutputs* out) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  IntegerCall call = make_call(linear, {});
  round_rows(linear, rows, in, &call);
  for_pairs(call, linear, neighbours(linear), rows,
            [&](const PanelPair* pairs, int64_t num_pairs, int64_t first_row, int64_t end_row) {
              const Panel* const* last_pair = pairs[num_pairs - 1].panel;
              const Panel& last = *(last_pair[1] != nullptr ? last_pair[1] : last_pair[0]);
              const ProductPiece piece = {first_row, end_row, pairs[0].panel[0]->first_output,
                                          last.first_output + last.num_outputs};
              out->take(call, piece, [&](const IntegerCall& own) {
                set.multiply_panels(own, pairs, num_pairs, first_row, end_row);
              });
            });
}

bool gates_integers(const Linear& gate_up) {
  const std::vector<Part>& parts = gate_up.parts;
  return gate_up.is_integer() && parts.size() == 2 && parts[0].rows == parts[1].rows && gate_up.bias.empty();
}

void multiply_gated_integers(const Linear& gate_up, int64_t rows, const InputRows& in, Activation activation,
                             bf16* out) {
  if (rows == 0) return;
  const Kernels& set = kernels();
  set.enter();
  IntegerCall call = make_call(gate_up, {out, Dtype::bfloat16});
  call.out_features = gate_up.out_features / 2;
  round_rows(gate_up, rows, in, &call);
  const int64_t half = static_cast<int64_t>(gate_up.panels.size()) / 2;
  const Pairing gates_and_ups = {half, 1, half};
  const auto run = [&](const PanelPair* pairs, int64_t num_pairs, int64_t first_row, int64_t end_row) {
    set.multiply_gated_panels(call, pairs, num_pairs, activation, first_row, end_row);
  };
  for_pairs(call, gate_up, gates_and_ups, rows, run);
}

}  // namespace penstock
