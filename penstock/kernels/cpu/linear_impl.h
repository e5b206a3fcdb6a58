// Matrix products with plain vectors, compiled once per instruction set: a panel is widened to float32, then small
// blocks of outputs and rows run along the inputs. Each output element has one accumulator, whose lane i sums the
// inputs i, i + 16, i + 32, ... in order; the lanes are then summed in a fixed order. Neither depends on the number
// of rows.
#pragma once

#include "integer_impl.h"
#include "linear.h"
#include "linear_write.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

struct GroupTable {
  float scale[kPanelOutputs];
  float offset[kPanelOutputs];
};

PENSTOCK_INLINE void load_table(const Part& part, const uint8_t* tile, int64_t group, GroupTable* table) {
  const uint8_t* offsets = tile + part.table_bytes();
  Floats scale, offset = zeros();
  if (part.half_scales) {
    scale = load_halves(reinterpret_cast<const uint16_t*>(tile) + group * kLanes);
    if (part.has_offsets) offset = load_halves(reinterpret_cast<const uint16_t*>(offsets) + group * kLanes);
  } else {
    scale = load(reinterpret_cast<const float*>(tile) + group * kLanes);
    if (part.has_offsets) offset = load(reinterpret_cast<const float*>(offsets) + group * kLanes);
  }
  store(table->scale, scale);
  store(table->offset, offset);
}

// 16 inputs of one output, as float32.
PENSTOCK_INLINE Floats widen_run(const Part& part, const uint8_t* tile, int64_t output, int64_t input,
                                 const GroupTable& table) {
  const uint8_t* codes = tile + part.codes_at();
  const int64_t at = output * kTileInputs + input;
  if (part.format == Format::float32) return load(reinterpret_cast<const float*>(codes) + at);
  if (part.format == Format::bfloat16) return load(reinterpret_cast<const bf16*>(codes) + at);
  Floats code;
  if (part.format == Format::int8) {
    code = load_bytes(reinterpret_cast<const int8_t*>(codes) + at);
  } else {
    const Ints words = load_words(reinterpret_cast<const uint16_t*>(codes) + output / 4 * kTileInputs + input);
    code = to_floats(shift_right(words, static_cast<int>(output % 4 * 4)) & broadcast_int(15));
  }
  return multiply_add(code, broadcast(table.scale[output]), broadcast(table.offset[output]));
}

// The same of a tile in the order of integer.h.
PENSTOCK_INLINE Floats widen_quads(const Part& part, const uint8_t* tile, int64_t output, int64_t input,
                                   const GroupTable& table) {
  const uint8_t* codes = tile + part.codes_at();
  float values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    values[i] = static_cast<float>(part.format == Format::int4
                                       ? PlainEngine::code_at<CodeKind::nibbles>(codes, input + i, output)
                                       : PlainEngine::code_at<CodeKind::bytes>(codes, input + i, output));
  }
  return multiply_add(load(values), broadcast(table.scale[output]), broadcast(table.offset[output]));
}

// One tile → [16 outputs][32 inputs] of float32.
static void widen_tile(const Part& part, const uint8_t* tile, float* to) {
  GroupTable table = {};
  for (int64_t input = 0; input < kTileInputs; input += kLanes) {
    if (part.groups_per_tile > 0) load_table(part, tile, input * part.groups_per_tile / kTileInputs, &table);
    for (int64_t output = 0; output < kPanelOutputs; ++output) {
      store(to + output * kTileInputs + input, widen_run(part, tile, output, input, table));
    }
  }
}

// Adds the products of whole runs of 16 inputs to the sums of kOutputs × kRows elements, of which it keeps kParts registers
// of each at a time, from `part` on.
template <int kOutputs, int kRows, int kParts>
PENSTOCK_INLINE void add_runs(const float* panel, int64_t step, int64_t first, int64_t end, const float* x,
                              int64_t x_stride, int part, Floats* sums) {
  FloatRegister sum[kOutputs * kRows][kParts];
#pragma GCC unroll 16
  for (int i = 0; i < kOutputs * kRows; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) sum[i][p] = sums[i].part[part + p];
  }
  for (int64_t k = first; k < end; k += kLanes) {
    const float* weights = panel + k / kTileInputs * step + k % kTileInputs + part * kRegisterLanes;
    const float* inputs = x + k + part * kRegisterLanes;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      FloatRegister activation[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) activation[r] = load_register(inputs + r * x_stride + p * kRegisterLanes);
#pragma GCC unroll 4
      for (int o = 0; o < kOutputs; ++o) {
        const FloatRegister weight = load_register(weights + o * kTileInputs + p * kRegisterLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sum[o * kRows + r][p] = fused_multiply_add(weight, activation[r], sum[o * kRows + r][p]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kOutputs * kRows; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) sums[i].part[part + p] = sum[i][p];
  }
}

// kOutputs × kRows elements of a product, a multiple of four; sums[row * 16 + output]. Tiles of the panel are `step`
// floats apart.
template <int kOutputs, int kRows>
static void multiply_block(const float* panel, int64_t step, int64_t num_inputs, const float* x, int64_t x_stride,
                           float* sums) {
  constexpr int kParts = kRows == 1 ? kRegisters : 1;
  constexpr int64_t kInputsAtOnce = 512;  // of all rows and outputs, in the nearest cache
  Floats sum[kOutputs * kRows] = {};
  const int64_t whole = num_inputs / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kInputsAtOnce) {
    const int64_t end = whole - first < kInputsAtOnce ? whole : first + kInputsAtOnce;
    for (int part = 0; part < kRegisters; part += kParts) {
      add_runs<kOutputs, kRows, kParts>(panel, step, first, end, x, x_stride, part, sum);
    }
  }
  if (whole < num_inputs) {
    const float* weights = panel + whole / kTileInputs * step + whole % kTileInputs;
    for (int o = 0; o < kOutputs; ++o) {
      for (int r = 0; r < kRows; ++r) {
        const Floats activation = load_some(x + r * x_stride + whole, num_inputs - whole);
        sum[o * kRows + r] = multiply_add(load(weights + o * kTileInputs), activation, sum[o * kRows + r]);
      }
    }
  }
  float flat[kOutputs * kRows];
  for (int i = 0; i < kOutputs * kRows; i += 4) reduce_four(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], flat + i);
  for (int o = 0; o < kOutputs; ++o)
    for (int r = 0; r < kRows; ++r) sums[r * kPanelOutputs + o] = flat[o * kRows + r];
}

// Blocks are as large as the register file allows: 32 registers with AVX-512 and on ARM, else 16.
#if PENSTOCK_REGISTER_BYTES == 64 || defined(__aarch64__)
constexpr int kBlockRows = 4;
#else
constexpr int kBlockRows = 3;
#endif
constexpr int kBlockOutputs = 4;

static void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  const Part& part = call.parts[strip.part];
  float* widened = scratch.get<float>(call.num_tiles * kTileElements);
  for (int32_t p = 0; p < strip.num_panels; ++p) {
    const uint8_t* tiles = part.panel(strip.first_panel + p);
    const int64_t tile_step = part.tile_step(strip.first_panel + p);
    const float* panel = reinterpret_cast<const float*>(tiles);
    int64_t step = tile_step / static_cast<int64_t>(sizeof(float));
    if (part.format != Format::float32) {
      for (int64_t t = 0; t < call.num_tiles; ++t) {
        widen_tile(part, tiles + t * tile_step, widened + t * kTileElements);
      }
      panel = widened;
      step = kTileElements;
    }
    alignas(64) float sums[kBlockRows * kPanelOutputs];
    int64_t rows = kBlockRows;
    for (int64_t row = first_row; row < end_row; row += rows) {
      const float* x = static_cast<const float*>(call.x) + row * call.x_stride;
      rows = end_row - row < kBlockRows ? 1 : kBlockRows;
      for (int o = 0; o < kPanelOutputs; o += kBlockOutputs) {
        const float* outputs = panel + o * kTileInputs;
        if (rows == 1) {
          multiply_block<kBlockOutputs, 1>(outputs, step, call.in_features, x, call.x_stride, sums + o);
        } else {
          multiply_block<kBlockOutputs, kBlockRows>(outputs, step, call.in_features, x, call.x_stride, sums + o);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        write_outputs(call, row + r, strip.first_output + p * kPanelOutputs, strip.num_outputs - p * kPanelOutputs,
                      load(sums + r * kPanelOutputs));
      }
    }
  }
}

// One row of a part, for embeddings.
template <typename Element>
static void read_row_as(const Part& part, int64_t row, int64_t num_inputs, Element* y) {
  const uint8_t* tiles = part.panel(row / kPanelOutputs);
  const int64_t step = part.tile_step(row / kPanelOutputs);
  GroupTable table = {};
  const int64_t output = row % kPanelOutputs;
  for (int64_t at = 0; at < num_inputs; at += kLanes) {
    const uint8_t* tile = tiles + at / kTileInputs * step;
    const int64_t input = at % kTileInputs;
    if (part.groups_per_tile > 0) load_table(part, tile, input * part.groups_per_tile / kTileInputs, &table);
    const Floats run = part.is_integer ? widen_quads(part, tile, output, input, table)
                                       : widen_run(part, tile, output, input, table);
    store_some(y + at, run, num_inputs - at);
  }
}

static void read_row(const Part& part, int64_t row, int64_t num_inputs, Dtype dtype, void* y) {
  if (dtype == Dtype::float32) return read_row_as(part, row, num_inputs, static_cast<float*>(y));
  return read_row_as(part, row, num_inputs, static_cast<bf16*>(y));
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
