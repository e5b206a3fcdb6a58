// Products in whole numbers, compiled once per instruction set: how a row is rounded, how sums are scaled and written.
// An Engine supplies the sums, which are exact, so they are the same in every batch and for every engine; it
// may do something else meanwhile, after each tile of inputs.
#pragma once

#include "elementwise_impl.h"
#include "integer.h"
#include "linear_write.h"
#include "rotation_impl.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Magnitudes are in the order of their bits, NaN last: a row with a NaN gets a scale of NaN, and with it all its
// products.
PENSTOCK_INLINE Ints larger_magnitudes(Ints largest, Floats values) {
  const Ints magnitudes = as_ints(values) & broadcast_int(0x7fffffff);
  FOR_PARTS largest.part[i] = magnitudes.part[i] > largest.part[i] ? magnitudes.part[i] : largest.part[i];
  return largest;
}

PENSTOCK_INLINE float largest_lane(Ints magnitudes) {
  int32_t lanes[kLanes], largest = 0;
  memcpy(lanes, &magnitudes, sizeof lanes);
  for (int i = 0; i < kLanes; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  float value;
  memcpy(&value, &largest, sizeof value);
  return value;
}

// Added to a small number, it leaves the nearest integer plus 128 in the lowest byte.
constexpr float kCodeRounder = 12582912.0f + kCodeOffset;

[[maybe_unused]] static void round_row(const IntegerCall& call, const bf16* x, int64_t width, int64_t row) {
  static thread_local Scratch scratch;
  float* rotated = scratch.get<float>(call.num_tiles * kIntegerTileInputs);
  Ints magnitudes = broadcast_int(0);
  const auto rotate_run = [&](const bf16* from, float* to) {
    Floats run[kRunRegisters];
    for (int j = 0; j < kRunRegisters; ++j) run[j] = load(from + j * kLanes);
    rotate(run);
    for (int j = 0; j < kRunRegisters; ++j) {
      magnitudes = larger_magnitudes(magnitudes, run[j]);
      store(to + j * kLanes, run[j]);
    }
  };
  const int64_t whole = width / kIntegerTileInputs * kIntegerTileInputs;
  for (int64_t i = 0; i < whole; i += kIntegerTileInputs) rotate_run(x + i, rotated + i);
  if (whole < width) {
    bf16 last[kIntegerTileInputs] = {};
    memcpy(last, x + whole, static_cast<size_t>(width - whole) * sizeof(bf16));
    rotate_run(last, rotated + whole);
  }
  const float largest = largest_lane(magnitudes);
  call.row_scales[row] = largest / kLargestIntegerCode;
  const Floats inverse = broadcast(largest > 0 ? kLargestIntegerCode / largest : 0.0f);
  const Floats rounder = broadcast(kCodeRounder);
  uint8_t* to = call.row_codes(row);
  for (int64_t i = 0; i < width; i += kIntegerTileInputs, to += kCodesTileBytes) {
    for (int64_t j = 0; j < kIntegerTileInputs; j += kLanes) {
      store_bytes(to + j, as_ints(multiply_add(load(rotated + i + j), inverse, rounder)));
    }
  }
}

PENSTOCK_INLINE Floats round_to_bf16(Floats value) {
  bf16 rounded[kLanes];
  store(rounded, value);
  return load(rounded);
}

PENSTOCK_INLINE Floats scale_sums(const int32_t (&sums)[kPanelOutputs], Floats scales, Floats row_scale) {
  return to_floats(load_ints(sums)) * scales * row_scale;
}

// Which bytes of each of the next pair's tiles to ask memory for while some rows are summed: every turn takes its share,
// so that memory is as busy with the last as with the first.
struct BytesAhead {
  int64_t first;
  int64_t end;

  bool is_all() const { return first == 0 && end == kIntegerTileBytes; }

  static BytesAhead of_turn(int64_t turn, int64_t num_turns) {
    const int64_t share = round_up(ceil_div(kIntegerTileBytes, num_turns), 64), first = turn * share;
    return {first, first + share < kIntegerTileBytes ? first + share : kIntegerTileBytes};
  }
};

// Rows of sums that wait to be written: so many, from this index on.
struct WaitingRows {
  const PanelPair* pair;
  int64_t row;  // of the first
  int64_t index;
  int64_t count;
};

// write(rows, sums) for every row of every pair. Rows are written while the next are summed, some for each tile of
// inputs, so that neither waits for the other.
template <typename Engine, typename Write>
PENSTOCK_INLINE void for_rows_of_pairs(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                       int64_t first_row, int64_t end_row, const Write& write) {
  IntegerSums buffers[2];
  WaitingRows waiting = {};
  int current = 0;
  const auto write_some = [&](int64_t most) {
    const int64_t count = waiting.count < most ? waiting.count : most;
    if (count == 0) return;
    write(WaitingRows{waiting.pair, waiting.row, waiting.index, count}, buffers[1 - current]);
    waiting.row += count;
    waiting.index += count;
    waiting.count -= count;
  };
  const int64_t rows_per_tile = ceil_div(kRowsAtOnce, call.num_tiles);
  const int64_t num_turns = ceil_div(end_row - first_row, kRowsAtOnce);
  for (const PanelPair* pair = pairs; pair < pairs + num_pairs; ++pair) {
    for (int64_t row = first_row; row < end_row; row += kRowsAtOnce) {
      const int64_t rows = end_row - row < kRowsAtOnce ? end_row - row : kRowsAtOnce;
      const BytesAhead ahead = BytesAhead::of_turn((row - first_row) / kRowsAtOnce, num_turns);
      Engine::sum(call, *pair, row, rows, ahead, &buffers[current], [&] { write_some(rows_per_tile); });
      write_some(kRowsAtOnce);
      waiting = {pair, row, 0, rows};
      current = 1 - current;
    }
  }
  write_some(kRowsAtOnce);
}

// Rounded, or added to what is there after rounding.
template <bool kAdds>
PENSTOCK_INLINE void write_two(bf16* to, Floats first, Floats second) {
  if (kAdds) {
    bf16 rounded[2 * kLanes];
    store_two(rounded, first, second);
    first = load(rounded) + load(to);
    second = load(rounded + kLanes) + load(to + kLanes);
  }
  store_two(to, first, second);
}

// write_row(to, number of outputs, scaled sums of the first panel, of the second) for bfloat16 rows, where y has the first panel's outputs.
template <typename Engine, typename WriteRow>
PENSTOCK_INLINE void for_scaled_rows(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                     int64_t first_row, int64_t end_row, const WriteRow& write_row) {
  const int64_t stride = call.out_features;
  const float* row_scales = call.row_scales;
  bf16* y = static_cast<bf16*>(call.y);
  const auto write = [=](const WaitingRows& rows, const IntegerSums& sums) {
    const Panel &first = *rows.pair->panel[0], &second = *rows.pair->panel[1];
    const Floats first_scales = load(first.scales), second_scales = load(second.scales);
    bf16* to = y + rows.row * stride + first.first_output;
    for (int64_t i = 0; i < rows.count; ++i, to += stride) {
      const Floats row_scale = broadcast(row_scales[rows.row + i]);
      write_row(to, first.num_outputs, scale_sums(sums.of[0][rows.index + i], first_scales, row_scale),
                scale_sums(sums.of[1][rows.index + i], second_scales, row_scale));
    }
  };
  for_rows_of_pairs<Engine>(call, pairs, num_pairs, first_row, end_row, write);
}

// The most common case: whole panels of bfloat16 side by side, without bias.
template <typename Engine, bool kAdds>
static void multiply_whole_panels(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                  int64_t first_row, int64_t end_row) {
  for_scaled_rows<Engine>(call, pairs, num_pairs, first_row, end_row,
                          [](bf16* to, int64_t, Floats first, Floats second) { write_two<kAdds>(to, first, second); });
}

template <typename Engine>
static void multiply_panels_with(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                 int64_t first_row, int64_t end_row) {
  bool whole = call.y_dtype == Dtype::bfloat16 && call.bias == nullptr;
  for (const PanelPair* pair = pairs; whole && pair < pairs + num_pairs; ++pair) {
    for (const Panel* panel : pair->panel) whole = whole && panel != nullptr && panel->num_outputs == kPanelOutputs;
    whole = whole && pair->panel[1]->first_output == pair->panel[0]->first_output + kPanelOutputs;
  }
  if (whole && call.adds) return multiply_whole_panels<Engine, true>(call, pairs, num_pairs, first_row, end_row);
  if (whole) return multiply_whole_panels<Engine, false>(call, pairs, num_pairs, first_row, end_row);
  const auto write = [&](const WaitingRows& rows, const IntegerSums& sums) {
    for (int p = 0; p < 2 && rows.pair->panel[p] != nullptr; ++p) {
      const Panel& panel = *rows.pair->panel[p];
      const Floats scales = load(panel.scales);
      for (int64_t i = 0; i < rows.count; ++i) {
        const Floats row_scale = broadcast(call.row_scales[rows.row + i]);
        write_outputs(call, rows.row + i, panel.first_output, panel.num_outputs,
                      scale_sums(sums.of[p][rows.index + i], scales, row_scale));
      }
    }
  };
  for_rows_of_pairs<Engine>(call, pairs, num_pairs, first_row, end_row, write);
}

// activation(first) × second, rounded wherever the separate operations round.
template <typename Engine, Activation kActivation>
static void multiply_pairs_gated(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs, int64_t first_row,
                                 int64_t end_row) {
  for_scaled_rows<Engine>(call, pairs, num_pairs, first_row, end_row,
                          [](bf16* to, int64_t num_outputs, Floats gates, Floats ups) {
                            const Floats active = activate_roughly(kActivation, round_to_bf16(gates));
                            store_some(to, active * round_to_bf16(ups), num_outputs);
                          });
}

template <typename Engine>
static void multiply_gated_panels_with(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                       Activation activation, int64_t first_row, int64_t end_row) {
  const auto multiply = activation == Activation::silu ? multiply_pairs_gated<Engine, Activation::silu>
                                                       : multiply_pairs_gated<Engine, Activation::gelu_tanh>;
  multiply(call, pairs, num_pairs, first_row, end_row);
}

// Sixteen outputs at a time, one input after the other.
struct PlainEngine {
  template <typename Meanwhile>
  static void sum(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t rows, const BytesAhead&,
                  IntegerSums* sums, const Meanwhile&) {
    for (int p = 0; p < 2 && pair.panel[p] != nullptr; ++p) {
      for (int64_t r = 0; r < rows; ++r) sum_row(call, *pair.panel[p], call.row_codes(row + r), sums->of[p][r]);
    }
  }

  static void sum_row(const IntegerCall& call, const Panel& panel, const uint8_t* x, int32_t* to) {
    Ints sum = load_ints(panel.offsets);
    for (int64_t t = 0; t < call.num_tiles; ++t) {
      for (int64_t input = 0; input < kIntegerTileInputs; ++input) {
        const Ints codes = load_ints(panel.tiles + t * kIntegerTileBytes + input / kQuadInputs * kQuadBytes);
        const int unused_bits = static_cast<int>(24 - 8 * (input % kQuadInputs));
        const Ints code = shift_right_signed(shift_left(codes, unused_bits), 24);
        sum = sum + code * broadcast_int(x[t * kCodesTileBytes + input]);
      }
    }
    memcpy(to, &sum, sizeof sum);
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
