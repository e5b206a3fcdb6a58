// Matrix products with plain vectors, compiled once per instruction set: a panel is widened to float32 (bfloat16 and
// few rows: on the way), then small blocks of outputs and rows run along the inputs. Each output element has one
// accumulator, whose lane i sums the inputs i, i + 16, i + 32, ... in order; the lanes are then summed in a fixed
// order. Neither depends on the number of rows.
#pragma once

#include "integer_impl.h"
#include "linear.h"
#include "linear_write.h"
#include "register_tile.h"
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
template <Format kFormat>
static void widen_tile_of(const Part& any, const uint8_t* tile, float* to) {
  Part part = any;
  part.format = kFormat;  // known to the compiler
  GroupTable table = {};
  for (int64_t input = 0; input < kTileInputs; input += kLanes) {
    if (part.groups_per_tile > 0) load_table(part, tile, input * part.groups_per_tile / kTileInputs, &table);
    for (int64_t output = 0; output < kPanelOutputs; ++output) {
      store(to + output * kTileInputs + input, widen_run(part, tile, output, input, table));
    }
  }
}

static void widen_tile(const Part& part, const uint8_t* tile, float* to) {
  switch (part.format) {
    case Format::float32: return widen_tile_of<Format::float32>(part, tile, to);
    case Format::bfloat16: return widen_tile_of<Format::bfloat16>(part, tile, to);
    case Format::int8: return widen_tile_of<Format::int8>(part, tile, to);
    case Format::int4: return widen_tile_of<Format::int4>(part, tile, to);
  }
}

// Adds the products of whole runs of 16 inputs to the sums of kOutputs × kRows elements, of which it keeps one register
// each, number `part`.
template <int kOutputs, int kRows, typename Element>
PENSTOCK_INLINE void add_runs(const Element* panel, int64_t step, int64_t first, int64_t end, const float* x,
                              int64_t x_stride, int part, Floats* sums) {
  FloatRegister sum[kOutputs * kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kOutputs * kRows; ++i) sum[i] = sums[i].part[part];
  for (int64_t k = first; k < end; k += kLanes) {
    const Element* weights = panel + k / kTileInputs * step + k % kTileInputs + part * kRegisterLanes;
    const float* inputs = x + k + part * kRegisterLanes;
    FloatRegister activation[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) activation[r] = load_register(inputs + r * x_stride);
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) {
      const FloatRegister weight = load_register(weights + o * kTileInputs);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[o * kRows + r] = fused_multiply_add(weight, activation[r], sum[o * kRows + r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kOutputs * kRows; ++i) sums[i].part[part] = sum[i];
}

// Blocks are as large as the register file allows: 32 registers with AVX-512 and on ARM, else 16.
#if PENSTOCK_REGISTER_BYTES == 64 || defined(__aarch64__)
constexpr int kBlockRows = 4;
#else
constexpr int kBlockRows = 3;
#endif
constexpr int kBlockOutputs = 4;
constexpr int kRowOutputs = 8;  // of a block of one row

// The 16 outputs of a panel for kRows rows; sums[row * 16 + output]. Tiles of the panel are `step` elements apart. A
// window of inputs at a time: all its weights and activations are in the nearest cache while they are used.
template <int kRows, typename Element>
static void multiply_block(const Element* panel, int64_t step, int64_t num_inputs, const float* x, int64_t x_stride,
                           float* sums) {
  constexpr int kOutputs = kRows == 1 ? kRowOutputs : kBlockOutputs;
  constexpr int64_t kWindow = 256;
  Floats sum[kPanelOutputs * kRows] = {};
  const int64_t whole = num_inputs / kLanes * kLanes;
  for (int64_t first = 0; first < whole; first += kWindow) {
    const int64_t end = whole - first < kWindow ? whole : first + kWindow;
    if (sizeof(Element) == 2) {  // from memory, once: the next window
      for (int64_t k = first; k < end; k += kTileInputs) {
        const Element* tile = panel + (k + kWindow) / kTileInputs * step;
        for (int64_t o = 0; o < kPanelOutputs; ++o) __builtin_prefetch(tile + o * kTileInputs);
      }
    }
    for (int o = 0; o < kPanelOutputs; o += kOutputs) {
      for (int part = 0; part < kRegisters; ++part) {
        add_runs<kOutputs, kRows>(panel + o * kTileInputs, step, first, end, x, x_stride, part, sum + o * kRows);
      }
    }
  }
  if (whole < num_inputs) {
    const Element* weights = panel + whole / kTileInputs * step + whole % kTileInputs;
    for (int o = 0; o < kPanelOutputs; ++o) {
      for (int r = 0; r < kRows; ++r) {
        const Floats activation = load_some(x + r * x_stride + whole, num_inputs - whole);
        sum[o * kRows + r] = multiply_add(load(weights + o * kTileInputs), activation, sum[o * kRows + r]);
      }
    }
  }
  float flat[kPanelOutputs * kRows];
  for (int i = 0; i < kPanelOutputs * kRows; i += 4) {
    reduce_four(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], flat + i);
  }
  for (int o = 0; o < kPanelOutputs; ++o)
    for (int r = 0; r < kRows; ++r) sums[r * kPanelOutputs + o] = flat[o * kRows + r];
}

// All rows and the outputs of panel `p` of a strip.
template <typename Element>
static void multiply_panel(const LinearCall& call, const Strip& strip, int32_t p, const Element* panel, int64_t step,
                           int64_t first_row, int64_t end_row) {
  alignas(64) float sums[kBlockRows * kPanelOutputs];
  for_row_groups<kBlockRows>(end_row - first_row, [&](auto count, int64_t at) {
    constexpr int rows = decltype(count)::value;
    const int64_t row = first_row + at;
    const float* x = static_cast<const float*>(call.x) + row * call.x_stride;
    multiply_block<rows>(panel, step, call.in_features, x, call.x_stride, sums);
    for (int64_t r = 0; r < rows; ++r) {
      write_outputs(call, row + r, strip.first_output + p * kPanelOutputs, strip.num_outputs - p * kPanelOutputs,
                    load(sums + r * kPanelOutputs));
    }
  });
}

static void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row) {
  static thread_local Scratch scratch;
  const Part& part = call.parts[strip.part];
  for (int32_t p = 0; p < strip.num_panels; ++p) {
    const uint8_t* tiles = part.panel(strip.first_panel + p);
    const int64_t step = part.tile_step(strip.first_panel + p);
    if (part.format == Format::float32) {
      multiply_panel(call, strip, p, reinterpret_cast<const float*>(tiles), step / 4, first_row, end_row);
    } else if (part.format == Format::bfloat16 && end_row - first_row <= kBlockRows) {
      multiply_panel(call, strip, p, reinterpret_cast<const bf16*>(tiles), step / 2, first_row, end_row);
    } else {
      float* widened = scratch.get<float>(call.num_tiles * kTileElements);
      for (int64_t t = 0; t < call.num_tiles; ++t) widen_tile(part, tiles + t * step, widened + t * kTileElements);
      multiply_panel(call, strip, p, widened, kTileElements, first_row, end_row);
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
