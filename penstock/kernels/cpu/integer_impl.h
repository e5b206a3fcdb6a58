// Products in whole numbers, compiled once per instruction set: how a row is rounded and how sums are written. An Engine
// supplies the scaled sums of some rows and one panel.
#pragma once

#include "elementwise_impl.h"
#include "integer.h"
#include "linear_write.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// Magnitudes are in the order of their bits, NaN last: a group with a NaN gets a scale of NaN, and with it all products
// of its row.
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

// Added to a small number, it leaves the nearest integer in the lowest bits.
constexpr float kCodeRounder = 12582912.0f;

// Rounds 32 values, and replaces the values by the remainders.
PENSTOCK_INLINE void round_group(Floats (&halves)[2], int8_t* codes, RoundedGroup* group) {
  const float largest = largest_lane(larger_magnitudes(larger_magnitudes(broadcast_int(0), halves[0]), halves[1]));
  const Floats inverse = broadcast(largest > 0 ? kLargestCode / largest : 0.0f), rounder = broadcast(kCodeRounder);
  const Floats step = broadcast(largest / kLargestCode);
  int32_t sums[2];
  for (int half = 0; half < 2; ++half) {
    const Floats shifted = multiply_add(halves[half], inverse, rounder);
    store_bytes(reinterpret_cast<uint8_t*>(codes) + half * kLanes, as_ints(shifted));
    halves[half] = multiply_add(zeros() - (shifted - rounder), step, halves[half]);
    const float sum = reduce_sum(shifted - rounder);
    sums[half] = sum == sum ? static_cast<int32_t>(sum) : 0;
  }
  group->scale = largest / kLargestCode;
  group->code_sum = sums[0] + sums[1];
  group->first_code_sum = sums[0];
  group->sum = group->scale * static_cast<float>(group->code_sum);
}

template <typename T>
static void round_row_of(const IntegerCall& call, const T* x, int64_t width, int64_t row) {
  for (int64_t t = 0; t < call.num_tiles; ++t) {
    const T* from = x + t * kTileInputs;
    const int64_t count = width - t * kTileInputs;
    Floats halves[2] = {load_some(from, count),
                        count > kLanes ? load_some(from + kLanes, count - kLanes) : zeros()};
    for (int64_t term = row * kTerms; term < (row + 1) * kTerms; ++term) {
      round_group(halves, call.row_codes(term) + t * kTileInputs, call.row_groups(term) + t);
    }
  }
}

[[maybe_unused]] static void round_row(const IntegerCall& call, Dtype dtype, const void* x, int64_t width,
                                       int64_t row) {
  if (dtype == Dtype::float32) return round_row_of(call, static_cast<const float*>(x), width, row);
  return round_row_of(call, static_cast<const bf16*>(x), width, row);
}

// Two codes in a byte become two bytes, in the order of 8-bit codes.
static void unpack_nibbles(const uint8_t* from, int64_t step, int64_t num_tiles, uint8_t* to) {
  for (int64_t t = 0; t < num_tiles; ++t, from += step, to += kTileElements) {
    for (int i = 0; i < kTileElements / 2; ++i) {
      to[i] = from[i] & 15;
      to[i + kTileElements / 2] = static_cast<uint8_t>(from[i] >> 4);
    }
  }
}

// From this many rows of codes on, nibbles are unpacked once for all rows.
constexpr int64_t kUnpackRows = 12;

template <typename Engine, CodeKind kKind>
PENSTOCK_INLINE void multiply_codes(const IntegerCall& call, const Part& part, const uint8_t* tiles,
                                    const PanelCodes& codes, int64_t row, int64_t rows, float* sums) {
  if (part.groups_per_tile == 1) {
    Engine::template multiply<kKind, 1>(call, part, tiles, codes, row, rows, sums);
  } else {
    Engine::template multiply<kKind, 2>(call, part, tiles, codes, row, rows, sums);
  }
}

constexpr int64_t kOutputRows = kRowsAtOnce / kTerms;

// The product of some rows and the 16 outputs of a panel.
template <typename Engine>
struct PanelProduct {
  const IntegerCall& call;
  const Part& part;
  const uint8_t* tiles;
  PanelCodes codes;
  CodeKind kind;

  PanelProduct(const IntegerCall& of, const Panel& panel, int64_t rows, Scratch* scratch)
      : call(of), part(of.parts[panel.part]), tiles(panel.tiles) {
    codes = {tiles + part.codes_at(), part.tile_bytes};
    kind = part.format == Format::int4 ? CodeKind::nibbles : CodeKind::bytes;
    if (kind == CodeKind::nibbles && rows * kTerms >= kUnpackRows) {
      uint8_t* unpacked = scratch->get<uint8_t>(call.num_tiles * kTileElements);
      unpack_nibbles(codes.data, codes.step, call.num_tiles, unpacked);
      codes = {unpacked, kTileElements};
      kind = CodeKind::small_bytes;
    }
  }

  // sums[r * 16 + output], for at most kOutputRows rows of activations
  void sum(int64_t row, int64_t rows, float* sums) const {
    alignas(64) float terms[kRowsAtOnce * kPanelOutputs];
    sum_codes(row * kTerms, rows * kTerms, terms);
    for (int64_t r = 0; r < rows; ++r) {
      const float* first = terms + r * kTerms * kPanelOutputs;
      store(sums + r * kPanelOutputs, load(first) + load(first + kPanelOutputs));
    }
  }

  void sum_codes(int64_t row, int64_t rows, float* sums) const {
    switch (kind) {
      case CodeKind::nibbles: return multiply_codes<Engine, CodeKind::nibbles>(call, part, tiles, codes, row, rows, sums);
      case CodeKind::small_bytes:
        return multiply_codes<Engine, CodeKind::small_bytes>(call, part, tiles, codes, row, rows, sums);
      case CodeKind::bytes: return multiply_codes<Engine, CodeKind::bytes>(call, part, tiles, codes, row, rows, sums);
    }
  }
};

template <typename Engine>
static void multiply_panels_with(const IntegerCall& call, const Panel* panels, int64_t num_panels, int64_t first_row,
                                 int64_t end_row) {
  static thread_local Scratch scratch;
  alignas(64) float sums[kOutputRows * kPanelOutputs];
  for (const Panel* panel = panels; panel < panels + num_panels; ++panel) {
    const PanelProduct<Engine> product(call, *panel, end_row - first_row, &scratch);
    for (int64_t row = first_row; row < end_row; row += kOutputRows) {
      const int64_t rows = end_row - row < kOutputRows ? end_row - row : kOutputRows;
      product.sum(row, rows, sums);
      for (int64_t r = 0; r < rows; ++r) {
        write_outputs(call, row + r, panel->first_output, panel->num_outputs, load(sums + r * kPanelOutputs));
      }
    }
  }
}

template <typename T>
PENSTOCK_INLINE Floats rounded_as(const T*, Floats value) {
  T rounded[kLanes];
  store(rounded, value);
  return load(rounded);
}

// activation(gate) × up, rounded wherever the separate operations round.
template <typename T>
PENSTOCK_INLINE void write_gated(T* to, int64_t count, Activation activation, Floats gate, Floats up) {
  store_some(to, activate_as(to, activation, rounded_as(to, gate)) * rounded_as(to, up), count);
}

template <typename Engine>
static void multiply_gated_panels_with(const IntegerCall& call, const Panel* gates, const Panel* ups,
                                       int64_t num_panels, Activation activation, int64_t first_row,
                                       int64_t end_row) {
  static thread_local Scratch gate_scratch, up_scratch;
  alignas(64) float gate_sums[kOutputRows * kPanelOutputs], up_sums[kOutputRows * kPanelOutputs];
  for (int64_t p = 0; p < num_panels; ++p) {
    const PanelProduct<Engine> gate(call, gates[p], end_row - first_row, &gate_scratch);
    const PanelProduct<Engine> up(call, ups[p], end_row - first_row, &up_scratch);
    for (int64_t row = first_row; row < end_row; row += kOutputRows) {
      const int64_t rows = end_row - row < kOutputRows ? end_row - row : kOutputRows;
      gate.sum(row, rows, gate_sums);
      up.sum(row, rows, up_sums);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (row + r) * call.out_features + gates[p].first_output, count = gates[p].num_outputs;
        const Floats gated = load(gate_sums + r * kPanelOutputs), other = load(up_sums + r * kPanelOutputs);
        if (call.y_dtype == Dtype::float32) {
          write_gated(static_cast<float*>(call.y) + at, count, activation, gated, other);
        } else {
          write_gated(static_cast<bf16*>(call.y) + at, count, activation, gated, other);
        }
      }
    }
  }
}

PENSTOCK_INLINE Floats load_factors(const Part& part, const uint8_t* table, int64_t group) {
  return part.half_scales ? load_halves(reinterpret_cast<const uint16_t*>(table) + group * kLanes)
                          : load(reinterpret_cast<const float*>(table) + group * kLanes);
}

// The definition in plain C++, for machines without dot products of bytes and for tests.
struct PlainEngine {
  template <CodeKind kKind>
  static int32_t code_at(const uint8_t* codes, int64_t input, int64_t output) {
    const int64_t quad = input / kQuadInputs, lane = output * kQuadInputs + input % kQuadInputs;
    if (kKind == CodeKind::bytes) {
      return static_cast<int32_t>(static_cast<int8_t>(codes[quad * kQuadBytes + lane] ^ kCodeBias));
    }
    if (kKind == CodeKind::small_bytes) return codes[quad * kQuadBytes + lane];
    const uint8_t both = codes[quad % 4 * kQuadBytes + lane];
    return quad < 4 ? both & 15 : both >> 4;
  }

  template <CodeKind kKind, int kGroups>
  static void multiply(const IntegerCall& call, const Part& part, const uint8_t* tiles, const PanelCodes& codes,
                       int64_t row, int64_t rows, float* sums) {
    for (int64_t r = 0; r < rows; ++r) {
      Floats total = zeros();
      for (int64_t t = 0; t < call.num_tiles; ++t) {
        const uint8_t* tile = tiles + t * part.tile_bytes;
        const int8_t* x = call.row_codes(row + r) + t * kTileInputs;
        const RoundedGroup& rounded = call.row_groups(row + r)[t];
        for (int64_t g = 0; g < kGroups; ++g) {
          alignas(64) int32_t sum[kPanelOutputs];
          for (int64_t o = 0; o < kPanelOutputs; ++o) {
            sum[o] = 0;
            for (int64_t i = g * kTileInputs / kGroups; i < (g + 1) * kTileInputs / kGroups; ++i) {
              sum[o] += code_at<kKind>(codes.data + t * codes.step, i, o) * x[i];
            }
          }
          const Floats scales = load_factors(part, tile, g) * broadcast(rounded.scale);
          total = multiply_add(to_floats(load_ints(sum)), scales, total);
          if (!part.has_offsets) continue;
          const Floats offsets = load_factors(part, tile + part.table_bytes(), g);
          total = multiply_add(offsets, broadcast(group_sum<kGroups>(rounded, g)), total);
        }
      }
      store(sums + r * kPanelOutputs, total);
    }
  }

  template <int kGroups>
  static float group_sum(const RoundedGroup& rounded, int64_t group) {
    if (kGroups == 1) return rounded.sum;
    const int32_t first = rounded.first_code_sum;
    return rounded.scale * static_cast<float>(group == 0 ? first : rounded.code_sum - first);
  }
};

}  // namespace PENSTOCK_ISA
}  // namespace penstock
