// Products in whole numbers, compiled once per instruction set: how a row is rounded and how sums are written. An
// Engine supplies the scaled sums of some rows and one panel.
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

// Rounds 32 values to codes, written as two bytes each, as words, or both.
PENSTOCK_INLINE void round_group(const Floats (&halves)[2], uint8_t* bytes, int16_t* words, RoundedGroup* group) {
  const float largest = largest_lane(larger_magnitudes(larger_magnitudes(broadcast_int(0), halves[0]), halves[1]));
  const Floats inverse = broadcast(largest > 0 ? kLargestCode / largest : 0.0f), rounder = broadcast(kCodeRounder);
  int32_t sums[2];
  for (int half = 0; half < 2; ++half) {
    const Floats shifted = multiply_add(halves[half], inverse, rounder);
    const Ints code = as_ints(shifted);
    if (bytes != nullptr) {
      store_bytes(bytes + half * kLanes, shift_right(code + broadcast_int(128), 8));
      store_bytes(bytes + kTileInputs + half * kLanes, code);
    }
    if (words != nullptr) store_words(words + half * kLanes, code);
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
  uint8_t* bytes = call.bytes == nullptr ? nullptr : reinterpret_cast<uint8_t*>(call.row_bytes(row));
  int16_t* words = call.words == nullptr ? nullptr : call.row_words(row);
  for (int64_t t = 0; t < call.num_tiles; ++t) {
    const T* from = x + t * kTileInputs;
    const int64_t count = width - t * kTileInputs;
    const Floats halves[2] = {load_some(from, count),
                              count > kLanes ? load_some(from + kLanes, count - kLanes) : zeros()};
    round_group(halves, bytes == nullptr ? nullptr : bytes + t * kRowTileBytes,
                words == nullptr ? nullptr : words + t * kTileInputs, call.row_groups(row) + t);
  }
}

[[maybe_unused]] static void round_row(const IntegerCall& call, Dtype dtype, const void* x, int64_t width,
                                       int64_t row) {
  if (dtype == Dtype::float32) return round_row_of(call, static_cast<const float*>(x), width, row);
  return round_row_of(call, static_cast<const bf16*>(x), width, row);
}

PENSTOCK_INLINE Floats load_factors(const TileRun& run, const uint8_t* table, int64_t group) {
  return run.half_scales ? load_halves(reinterpret_cast<const uint16_t*>(table) + group * kLanes)
                         : load(reinterpret_cast<const float*>(table) + group * kLanes);
}

PENSTOCK_INLINE void prefetch_tile(const uint8_t* tile, int64_t tile_bytes) {
  for (int64_t line = 0; line < tile_bytes; line += 64) __builtin_prefetch(tile + line);
}

// Prefetches memory that will be read soon. With few rows: a tile at a fixed distance, in this panel or the next.
// With more rows: tile t of the tiles that will be unpacked next. A prefetch during unpacking would come too late.
template <CodeKind kKind>
PENSTOCK_INLINE void prefetch_ahead(const TileRun& run, const uint8_t* tile, int64_t t) {
  constexpr int64_t ahead = 4096;
  if (kKind != CodeKind::unpacked) return prefetch_tile(tile + ahead, run.step);
  if (run.next != nullptr) prefetch_tile(run.next + t * run.next_step, run.next_step);
}

// Calls body(run) with constants in `run`, so that the loops of the body need not test them.
template <CodeKind kKind, typename Body>
PENSTOCK_INLINE void with_known_run(TileRun run, const Body& body) {
  if (kKind == CodeKind::unpacked) run.half_scales = false;
  if (run.has_offsets) {
    run.has_offsets = true;
    return body(run);
  }
  run.has_offsets = false;
  body(run);
}

// Unpacks tiles to [scales][offsets][codes]: scales and offsets in float32, codes in the order that the engine reads.
template <typename Engine>
static TileRun unpack_tiles(const Part& part, const TileRun& packed, uint8_t* to) {
  const int64_t table_bytes = part.groups_per_tile * kPanelOutputs * static_cast<int64_t>(sizeof(float));
  TileRun run = packed;
  run.data = to;
  run.half_scales = false;
  run.offsets_at = table_bytes;
  run.codes_at = table_bytes * (run.has_offsets ? 2 : 1);
  run.step = run.codes_at + Engine::kUnpackedBytes;
  run.next = packed.data + Engine::kTilesAtOnce * packed.step;
  run.next_step = packed.step;
  for (int64_t t = 0; t < run.num_tiles; ++t, to += run.step) {
    const uint8_t* tile = packed.data + t * packed.step;
    for (int64_t g = 0; g < part.groups_per_tile; ++g) {
      store(reinterpret_cast<float*>(to) + g * kLanes, load_factors(packed, tile, g));
      if (!run.has_offsets) continue;
      store(reinterpret_cast<float*>(to + table_bytes) + g * kLanes,
            load_factors(packed, tile + packed.offsets_at, g));
    }
    if (part.format == Format::int4) {
      Engine::template unpack_codes<CodeKind::nibbles>(tile + packed.codes_at, to + run.codes_at);
    } else {
      Engine::template unpack_codes<CodeKind::bytes>(tile + packed.codes_at, to + run.codes_at);
    }
  }
  return run;
}

template <typename Engine, CodeKind kKind>
PENSTOCK_INLINE void multiply_run(const IntegerCall& call, const Part& part, const TileRun& run, int64_t row,
                                  int64_t rows, float* sums) {
  if (part.groups_per_tile == 1) {
    Engine::template multiply<kKind, 1>(call, run, row, rows, sums);
  } else {
    Engine::template multiply<kKind, 2>(call, run, row, rows, sums);
  }
}

// The product of some rows and the 16 outputs of a panel, [row][16], in `room`. Few rows use the packed tiles. For many
// rows, tiles are unpacked a few at a time, which stay in the nearest cache while all rows use them.
template <typename Engine>
static const float* sum_panel(const IntegerCall& call, const Panel& panel, int64_t first_row, int64_t end_row,
                              Scratch* room) {
  const Part& part = call.parts[panel.part];
  const int64_t rows = end_row - first_row, count = rows * kPanelOutputs;
  constexpr int64_t largest_tile = 4 * kPanelOutputs * sizeof(float) + Engine::kUnpackedBytes;
  float* sums = room->get<float>(count + Engine::kTilesAtOnce * largest_tile / 4);
  memset(sums, 0, static_cast<size_t>(count) * sizeof(float));
  TileRun run = {panel.tiles, part.tile_bytes, part.table_bytes(), part.codes_at(),
                 0,           call.num_tiles,  part.half_scales,   part.has_offsets, nullptr, 0};
  if (Engine::unpacks(call, part, rows)) {
    uint8_t* unpacked = reinterpret_cast<uint8_t*>(sums + count);
    for (; run.first_tile < call.num_tiles; run.first_tile += run.num_tiles) {
      const int64_t left = call.num_tiles - run.first_tile;
      run.num_tiles = left < Engine::kTilesAtOnce ? left : Engine::kTilesAtOnce;
      run.data = panel.tiles + run.first_tile * run.step;
      multiply_run<Engine, CodeKind::unpacked>(call, part, unpack_tiles<Engine>(part, run, unpacked), first_row, rows,
                                               sums);
    }
  } else if (part.format == Format::int4) {
    multiply_run<Engine, CodeKind::nibbles>(call, part, run, first_row, rows, sums);
  } else {
    multiply_run<Engine, CodeKind::bytes>(call, part, run, first_row, rows, sums);
  }
  return sums;
}

template <typename Engine>
static void multiply_panels_with(const IntegerCall& call, const Panel* panels, int64_t num_panels, int64_t first_row,
                                 int64_t end_row) {
  static thread_local Scratch room;
  for (const Panel* panel = panels; panel < panels + num_panels; ++panel) {
    const float* sums = sum_panel<Engine>(call, *panel, first_row, end_row, &room);
    for (int64_t row = first_row; row < end_row; ++row, sums += kPanelOutputs) {
      write_outputs(call, row, panel->first_output, panel->num_outputs, load(sums));
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
  static thread_local Scratch gate_room, up_room;
  for (int64_t p = 0; p < num_panels; ++p) {
    const float* gate_sums = sum_panel<Engine>(call, gates[p], first_row, end_row, &gate_room);
    const float* up_sums = sum_panel<Engine>(call, ups[p], first_row, end_row, &up_room);
    for (int64_t row = first_row; row < end_row; ++row, gate_sums += kPanelOutputs, up_sums += kPanelOutputs) {
      const int64_t at = row * call.out_features + gates[p].first_output, count = gates[p].num_outputs;
      if (call.y_dtype == Dtype::float32) {
        write_gated(static_cast<float*>(call.y) + at, count, activation, load(gate_sums), load(up_sums));
      } else {
        write_gated(static_cast<bf16*>(call.y) + at, count, activation, load(gate_sums), load(up_sums));
      }
    }
  }
}

template <int kGroups>
PENSTOCK_INLINE int32_t group_code_sum(const RoundedGroup& rounded, int64_t group) {
  if (kGroups == 1) return rounded.code_sum;
  return group == 0 ? rounded.first_code_sum : rounded.code_sum - rounded.first_code_sum;
}

template <int kGroups>
PENSTOCK_INLINE float group_sum(const RoundedGroup& rounded, int64_t group) {
  return kGroups == 1 ? rounded.sum : rounded.scale * static_cast<float>(group_code_sum<kGroups>(rounded, group));
}

// The definition in plain C++, for machines without dot products of bytes and for tests.
struct PlainEngine {
  static constexpr int64_t kWordRows = kBytesOnly, kTilesAtOnce = 0, kUnpackedBytes = 0;
  static constexpr bool kWideBytes = false;

  static bool unpacks(const IntegerCall&, const Part&, int64_t) { return false; }

  template <CodeKind kKind>
  static void unpack_codes(const uint8_t*, uint8_t*) {}

  template <CodeKind kKind>
  static int32_t code_at(const uint8_t* codes, int64_t input, int64_t output) {
    const int64_t quad = input / kQuadInputs, lane = output * kQuadInputs + input % kQuadInputs;
    if (kKind == CodeKind::bytes) {
      return static_cast<int32_t>(static_cast<int8_t>(codes[quad * kQuadBytes + lane] ^ kCodeBias));
    }
    const uint8_t both = codes[quad % 4 * kQuadBytes + lane];
    return quad < 4 ? both & 15 : both >> 4;
  }

  template <CodeKind kKind, int kGroups>
  static void multiply(const IntegerCall& call, const TileRun& run, int64_t row, int64_t rows, float* sums) {
    for (int64_t r = 0; r < rows; ++r) {
      Floats total = zeros();
      for (int64_t t = 0; t < call.num_tiles; ++t) {
        const uint8_t* tile = run.data + t * run.step;
        const int8_t* x = call.row_bytes(row + r) + t * kRowTileBytes;
        const RoundedGroup& rounded = call.row_groups(row + r)[t];
        for (int64_t g = 0; g < kGroups; ++g) {
          alignas(64) int32_t sum[kPanelOutputs];
          for (int64_t o = 0; o < kPanelOutputs; ++o) {
            sum[o] = 0;
            for (int64_t i = g * kTileInputs / kGroups; i < (g + 1) * kTileInputs / kGroups; ++i) {
              sum[o] += code_at<kKind>(tile + run.codes_at, i, o) * (x[i] * 256 + x[i + kTileInputs]);
            }
          }
          const Floats scales = load_factors(run, tile, g) * broadcast(rounded.scale);
          total = multiply_add(to_floats(load_ints(sum)), scales, total);
          if (!run.has_offsets) continue;
          const Floats offsets = load_factors(run, tile + run.offsets_at, g);
          total = multiply_add(offsets, broadcast(group_sum<kGroups>(rounded, g)), total);
        }
      }
      store(sums + r * kPanelOutputs, total);
    }
  }
};

template <typename Engine>
[[maybe_unused]] static void use_engine(Kernels* table, bool is_fast = true) {
  table->word_rows = Engine::kWordRows;
  table->wide_bytes = Engine::kWideBytes;
  table->multiply_panels = multiply_panels_with<Engine>;
  table->multiply_gated_panels = multiply_gated_panels_with<Engine>;
  table->fast_integers = is_fast;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
