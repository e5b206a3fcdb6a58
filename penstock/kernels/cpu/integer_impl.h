// Products in whole numbers, compiled once per instruction set: how a row is split into planes, how sums are scaled and
// written. An Engine supplies the sums, which are exact, so they are the same in every batch and for every engine; it
// may do something else meanwhile, after each tile of inputs.
#pragma once

#include "elementwise_impl.h"
#include "integer.h"
#include "linear_write.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Magnitudes of bfloat16 are in the order of their bits, NaN last: a row with a NaN gets a scale of NaN, and with it
// all its products.
static float largest_magnitude(const bf16* x, int64_t width) {
  bf16 largest = 0;
  for (int64_t i = 0; i < width; ++i) {
    const bf16 magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const uint32_t bits = static_cast<uint32_t>(largest) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Added to a small number, it leaves the nearest integer plus 32768 in the lowest 16 bits.
constexpr float kSplitRounder = 12582912.0f + 32768.0f;
constexpr float kLargestCode = 32767.0f;

[[maybe_unused]] static void split_row(const IntegerCall& call, const bf16* x, int64_t width, int64_t row) {
  const float largest = largest_magnitude(x, width);
  call.row_scales[row] = largest / kLargestCode;
  const Floats inverse = broadcast(largest > 0 ? kLargestCode / largest : 0.0f), rounder = broadcast(kSplitRounder);
  const auto split = [&](Floats values, uint8_t* to) {
    const Ints codes = as_ints(multiply_add(values, inverse, rounder));
    store_bytes(to, shift_right(codes, 8));
    store_bytes(to + kPlaneTileBytes, codes);
  };
  uint8_t* to = call.row_planes(row);
  int64_t i = 0;
  for (; i + kIntegerTileInputs <= width; i += kIntegerTileInputs, to += kPlanesStep) {
    for (int64_t j = 0; j < kIntegerTileInputs; j += kLanes) split(load(x + i + j), to + j);
  }
  for (; i < width; i += kLanes, to += kLanes) split(load_some(x + i, width - i), to);
}

PENSTOCK_INLINE Floats round_to_bf16(Floats value) {
  bf16 rounded[kLanes];
  store(rounded, value);
  return load(rounded);
}

// Row `block_row` of a panel's sums, which begin with the panel's offsets.
PENSTOCK_INLINE Floats scale_sums(const Panel& panel, const int32_t (&sums)[2][kIntegerBlockRows][kPanelOutputs],
                                  int64_t block_row, float row_scale) {
  const Floats high = to_floats(load_ints(sums[0][block_row])), low = to_floats(load_ints(sums[1][block_row]));
  const Floats whole = multiply_add(high, broadcast(256.0f), low);
  return whole * load(panel.scales) * broadcast(row_scale);
}

// Which bytes of each of the next pair's tiles to ask memory for while a block is summed: every block of a pair takes
// its share, so that memory is as busy with the last as with the first.
struct BytesAhead {
  int64_t first;
  int64_t end;

  bool is_all() const { return first == 0 && end == kIntegerTileBytes; }

  static BytesAhead of_block(int64_t block, int64_t num_blocks) {
    const int64_t share = round_up(ceil_div(kIntegerTileBytes, num_blocks), 64), first = block * share;
    return {first, first + share < kIntegerTileBytes ? first + share : kIntegerTileBytes};
  }
};

// Sums that wait to be written.
struct WaitingSums {
  const PanelPair* pair;
  int64_t first_row;
  int64_t num_rows;
  int64_t num_written;
};

// write(pair, row, row in the block, sums) for every row of every pair. The rows of one block are written while the
// next is summed, some for each tile of inputs, so that neither waits for the other.
template <typename Engine, typename Write>
PENSTOCK_INLINE void for_rows_of_pairs(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                       int64_t first_row, int64_t end_row, const Write& write) {
  IntegerSums buffers[2];
  WaitingSums waiting = {};
  int current = 0;
  const auto write_some = [&](int64_t count) {
    for (; count > 0 && waiting.num_written < waiting.num_rows; --count, ++waiting.num_written) {
      write(*waiting.pair, waiting.first_row + waiting.num_written, waiting.num_written, buffers[1 - current]);
    }
  };
  const int64_t rows_per_tile = ceil_div(kIntegerBlockRows, call.num_tiles);
  const int64_t num_blocks = ceil_div(end_row - first_row, kIntegerBlockRows);
  for (const PanelPair* pair = pairs; pair < pairs + num_pairs; ++pair) {
    for (int64_t row = first_row; row < end_row; row += kIntegerBlockRows) {
      const int64_t rows = end_row - row < kIntegerBlockRows ? end_row - row : kIntegerBlockRows;
      const BytesAhead ahead = BytesAhead::of_block((row - first_row) / kIntegerBlockRows, num_blocks);
      Engine::sum(call, *pair, row, rows, ahead, &buffers[current], [&] { write_some(rows_per_tile); });
      write_some(kIntegerBlockRows);
      waiting = {pair, row, rows, 0};
      current = 1 - current;
    }
  }
  write_some(kIntegerBlockRows);
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

// The most common case: whole panels of bfloat16 side by side, without bias.
template <typename Engine, bool kAdds>
static void multiply_whole_panels(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                  int64_t first_row, int64_t end_row) {
  const int64_t stride = call.out_features;
  const float* row_scales = call.row_scales;
  bf16* y = static_cast<bf16*>(call.y);
  const auto write = [=](const PanelPair& pair, int64_t row, int64_t block_row, const IntegerSums& sums) {
    const Panel &first = *pair.panel[0], &second = *pair.panel[1];
    const float row_scale = row_scales[row];
    const Floats low = scale_sums(first, sums.of[0], block_row, row_scale);
    const Floats high = scale_sums(second, sums.of[1], block_row, row_scale);
    write_two<kAdds>(y + row * stride + first.first_output, low, high);
  };
  for_rows_of_pairs<Engine>(call, pairs, num_pairs, first_row, end_row, write);
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
  const auto write = [&](const PanelPair& pair, int64_t row, int64_t block_row, const IntegerSums& sums) {
    for (int p = 0; p < 2 && pair.panel[p] != nullptr; ++p) {
      const Panel& panel = *pair.panel[p];
      write_outputs(call, row, panel.first_output, panel.num_outputs,
                    scale_sums(panel, sums.of[p], block_row, call.row_scales[row]));
    }
  };
  for_rows_of_pairs<Engine>(call, pairs, num_pairs, first_row, end_row, write);
}

// activation(first) × second, rounded wherever the separate operations round.
template <typename Engine>
static void multiply_gated_panels_with(const IntegerCall& call, const PanelPair* pairs, int64_t num_pairs,
                                       Activation activation, int64_t first_row, int64_t end_row) {
  const auto write = [&](const PanelPair& pair, int64_t row, int64_t block_row, const IntegerSums& sums) {
    const Panel &gate = *pair.panel[0], &up = *pair.panel[1];
    const float row_scale = call.row_scales[row];
    const Floats gates = round_to_bf16(scale_sums(gate, sums.of[0], block_row, row_scale));
    const Floats ups = round_to_bf16(scale_sums(up, sums.of[1], block_row, row_scale));
    bf16* to = static_cast<bf16*>(call.y) + row * call.out_features + gate.first_output;
    store_some(to, activate_roughly(activation, gates) * ups, gate.num_outputs);
  };
  for_rows_of_pairs<Engine>(call, pairs, num_pairs, first_row, end_row, write);
}

// Sixteen outputs at a time, one input after the other.
struct PlainEngine {
  template <typename Meanwhile>
  static void sum(const IntegerCall& call, const PanelPair& pair, int64_t row, int64_t rows, const BytesAhead&,
                  IntegerSums* sums, const Meanwhile&) {
    for (int p = 0; p < 2 && pair.panel[p] != nullptr; ++p) {
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t *tiles = pair.panel[p]->tiles, *x = call.row_planes(row + r);
        sum_plane(tiles, x, call.num_tiles, load_ints(pair.panel[p]->offsets), sums->of[p][0][r]);
        sum_plane(tiles, x + kPlaneTileBytes, call.num_tiles, broadcast_int(0), sums->of[p][1][r]);
      }
    }
  }

  static void sum_plane(const uint8_t* tiles, const uint8_t* x, int64_t num_tiles, Ints sum, int32_t* to) {
    for (int64_t t = 0; t < num_tiles; ++t) {
      for (int64_t input = 0; input < kIntegerTileInputs; ++input) {
        const Ints codes = load_ints(tiles + t * kIntegerTileBytes + input / kQuadInputs * kQuadBytes);
        const int unused_bits = static_cast<int>(24 - 8 * (input % kQuadInputs));
        const Ints code = shift_right_signed(shift_left(codes, unused_bits), 24);
        sum = sum + code * broadcast_int(x[t * kPlanesStep + input]);
      }
    }
    memcpy(to, &sum, sizeof sum);
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
