// Matrix products with plain vectors, compiled once per instruction set: a panel is widened to float32, then a few
// rows at a time run down it. One accumulator per output element goes through the inputs in order, whatever the
// number of rows.
#pragma once

#include "linear.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// As many rows as leave room in the register file for one accumulator each.
constexpr int kRowsAtOnce = kRegisters == 1 ? 8 : 4;

struct GroupTable {
  Floats scale;
  Floats offset;
};

PENSTOCK_INLINE GroupTable load_table(const Part& part, const uint8_t* tile, int group) {
  GroupTable table = {zeros(), zeros()};
  const uint8_t* offsets = tile + part.table_bytes();
  if (part.half_scales) {
    table.scale = load_halves(reinterpret_cast<const uint16_t*>(tile) + group * kLanes);
    if (part.has_offsets) table.offset = load_halves(reinterpret_cast<const uint16_t*>(offsets) + group * kLanes);
  } else {
    table.scale = load(reinterpret_cast<const float*>(tile) + group * kLanes);
    if (part.has_offsets) table.offset = load(reinterpret_cast<const float*>(offsets) + group * kLanes);
  }
  return table;
}

// One tile → [32 inputs][16 outputs] of float32.
static void widen_tile(const Part& part, const uint8_t* tile, float* to) {
  constexpr int kPairs = kTileInputs / 2;
  if (part.format == Format::bfloat16) {
    for (int pair = 0; pair < kPairs; ++pair) {
      const Ints both = load_ints(tile + pair * 64);
      store(to + 2 * pair * kLanes, low_halves(both));
      store(to + (2 * pair + 1) * kLanes, high_halves(both));
    }
    return;
  }
  if (part.format == Format::float32) {
    memcpy(to, tile, sizeof(float) * kTileElements);
    return;
  }
  const uint8_t* codes = tile + part.codes_at();
  const Ints nibble = broadcast_int(15);
  for (int half = 0; half < 2; ++half) {
    const GroupTable table = load_table(part, tile, half * part.groups_per_tile / 2);
    for (int j = 0; j < kPairs / 2; ++j) {
      const int pair = half * kPairs / 2 + j;
      Floats left, right;
      if (part.format == Format::int8) {
        const int8_t* from = reinterpret_cast<const int8_t*>(codes) + pair * 2 * kLanes;
        left = load_bytes(from);
        right = load_bytes(from + kLanes);
      } else {
        left = to_floats(shift_right(load_ints(codes + half * 128), 4 * j) & nibble);
        right = to_floats(shift_right(load_ints(codes + half * 128 + 64), 4 * j) & nibble);
      }
      store(to + 2 * pair * kLanes, multiply_add(every_second<0>(left, right), table.scale, table.offset));
      store(to + (2 * pair + 1) * kLanes, multiply_add(every_second<1>(left, right), table.scale, table.offset));
    }
  }
}

template <int kRows>
static void multiply_rows(const float* panel, int64_t num_inputs, const float* x, int64_t stride, Floats* sums) {
  Floats sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = zeros();
  for (int64_t k = 0; k < num_inputs; ++k) {
    const Floats weight = load(panel + k * kLanes);
    for (int r = 0; r < kRows; ++r) sum[r] = multiply_add(weight, broadcast(x[r * stride + k]), sum[r]);
  }
  for (int r = 0; r < kRows; ++r) sums[r] = sum[r];
}

PENSTOCK_INLINE void multiply_some_rows(int64_t rows, const float* panel, int64_t num_inputs, const float* x,
                                        int64_t stride, Floats* sums) {
  switch (rows) {
    case 1: return multiply_rows<1>(panel, num_inputs, x, stride, sums);
    case 2: return multiply_rows<2>(panel, num_inputs, x, stride, sums);
    case 3: return multiply_rows<3>(panel, num_inputs, x, stride, sums);
    case 4: return multiply_rows<4>(panel, num_inputs, x, stride, sums);
    case 5: return multiply_rows<5>(panel, num_inputs, x, stride, sums);
    case 6: return multiply_rows<6>(panel, num_inputs, x, stride, sums);
    case 7: return multiply_rows<7>(panel, num_inputs, x, stride, sums);
    default: return multiply_rows<8>(panel, num_inputs, x, stride, sums);
  }
}

// `count` outputs of one row, starting at `output`.
PENSTOCK_INLINE void write_outputs(const LinearCall& call, int64_t row, int64_t output, int64_t count, Floats sum) {
  const int64_t at = row * call.out_features + output;
  if (call.y_dtype == Dtype::float32) return store_some(static_cast<float*>(call.y) + at, sum, count);
  return store_some(static_cast<bf16*>(call.y) + at, sum, count);
}

PENSTOCK_INLINE Floats bias_at(const LinearCall& call, int64_t output) {
  return call.bias == nullptr ? zeros() : load(call.bias + output);
}

static void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  const Part& part = call.parts[strip.part];
  float* widened = scratch.get<float>(call.num_tiles * kTileElements);
  for (int32_t p = 0; p < strip.num_panels; ++p) {
    const uint8_t* tiles = part.panel(strip.first_panel + p);
    const float* panel = reinterpret_cast<const float*>(tiles);
    if (part.format != Format::float32) {
      for (int64_t t = 0; t < call.num_tiles; ++t) {
        widen_tile(part, tiles + t * part.tile_bytes, widened + t * kTileElements);
      }
      panel = widened;
    }
    const int64_t output = strip.first_output + p * kPanelOutputs;
    const int64_t left = strip.num_outputs - p * kPanelOutputs;
    const Floats bias = bias_at(call, output);
    for (int64_t row = first_row; row < end_row; row += kRowsAtOnce) {
      const int64_t rows = end_row - row < kRowsAtOnce ? end_row - row : kRowsAtOnce;
      Floats sums[8];
      const float* x = static_cast<const float*>(call.x) + row * call.x_stride;
      multiply_some_rows(rows, panel, call.in_features, x, call.x_stride, sums);
      for (int64_t r = 0; r < rows; ++r) write_outputs(call, row + r, output, left, sums[r] + bias);
    }
  }
}

// One row of a part, for embeddings.
static void read_row(const Part& part, int64_t row, int64_t num_inputs, Dtype dtype, void* y) {
  const uint8_t* tiles = part.panel(row / kPanelOutputs);
  const int64_t lane = row % kPanelOutputs;
  alignas(64) float widened[kTileElements];
  for (int64_t at = 0; at < num_inputs; at += kTileInputs) {
    widen_tile(part, tiles + at / kTileInputs * part.tile_bytes, widened);
    alignas(64) float column[kTileInputs];
    for (int k = 0; k < kTileInputs; ++k) column[k] = widened[k * kPanelOutputs + lane];
    for (int64_t k = 0; k < kTileInputs && at + k < num_inputs; k += kLanes) {
      const int64_t left = num_inputs - at - k;
      if (dtype == Dtype::float32) {
        store_some(static_cast<float*>(y) + at + k, load(column + k), left);
      } else {
        store_some(static_cast<bf16*>(y) + at + k, load(column + k), left);
      }
    }
  }
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
