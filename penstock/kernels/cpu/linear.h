// Packed weight matrices.
//
// Outputs are cut into panels of 16 and inputs into runs of 32; a tile is one run of one panel, [16 outputs][32
// inputs]. Panels go in pairs, called strips: a strip holds both panels' first tiles, then both second ones, and so
// on, one stream of memory. (A last, odd panel is a strip of its own.) A tile is stored as
//   float32   2048 bytes
//   bfloat16  1024 bytes
//   int8      scales, offsets, 512 bytes of codes
//   int4      scales, offsets, 256 bytes of codes: for each four outputs 32 words of 16 bits, one per input, the
//             code of the r-th output in bits 4r to 4r + 3
// with scales and offsets as [groups per tile][16 outputs], of float16 where that loses nothing, else float32.
// Padding (outputs past the last, inputs past the last) has zero codes, scales and offsets.
//
// All parts of a stack have this order, or else all are int8_rows, whose order is in integer.h.
//
// Why this order: a row of a tile is one 64-byte vector of bfloat16, so a 4-bit row of one group is a single table
// look-up of its 16 possible values; and a tile is an operand of an AMX product as it stands.
#pragma once

#include <vector>

#include "common.h"

namespace penstock {

constexpr int kPanelOutputs = 16;
constexpr int kTileInputs = 32;
constexpr int kTileElements = kPanelOutputs * kTileInputs;
constexpr int kStripPanels = 2;

enum class Format : int32_t { float32 = 0, bfloat16 = 1, int8 = 2, int4 = 3, int8_rows = 4 };

struct Part {
  Format format;
  bool half_scales;
  bool has_offsets;
  int32_t groups_per_tile;  // 0 when not quantized
  int64_t rows;
  int64_t first_output;
  int64_t num_panels;
  int64_t num_tiles;  // per panel
  int64_t tile_bytes;
  uint8_t* data;
  size_t data_bytes;

  // Of int8_rows, for every output of every panel, behind the codes.
  float* row_scales() const {
    return reinterpret_cast<float*>(data + data_bytes) - 2 * num_panels * kPanelOutputs;
  }
  int32_t* code_offsets() const {
    return reinterpret_cast<int32_t*>(data + data_bytes) - num_panels * kPanelOutputs;
  }

  int64_t table_bytes() const { return groups_per_tile * kPanelOutputs * (half_scales ? 2 : 4); }
  int64_t codes_at() const { return table_bytes() * (has_offsets ? 2 : 1); }
  // A panel's first tile, and the distance from one of its tiles to the next.
  uint8_t* panel(int64_t index) const {
    const int64_t strip = index / kStripPanels;
    return data + strip * kStripPanels * num_tiles * tile_bytes + index % kStripPanels * tile_bytes;
  }
  int64_t tile_step(int64_t index) const {
    const int64_t panels_left = num_panels - index / kStripPanels * kStripPanels;
    return tile_bytes * (panels_left < kStripPanels ? panels_left : kStripPanels);
  }
};

// One unit of work.
struct Strip {
  int32_t part;
  int32_t num_panels;
  int64_t first_panel;
  int64_t first_output;
  int64_t num_outputs;
  const uint8_t* data;
};

// Of an int8_rows part: 16 outputs, fewer at its end. Scales and offsets are there for all 16.
struct Panel {
  const uint8_t* tiles;
  const float* scales;
  const int32_t* offsets;  // of the sums: see integer.h
  int64_t first_output;
  int64_t num_outputs;
};

struct Linear {
  int64_t in_features;
  int64_t out_features = 0;
  int64_t num_tiles;  // per panel
  std::vector<Part> parts;
  std::vector<Strip> strips;  // empty where parts are int8_rows,
  std::vector<Panel> panels;  // and then these are there
  std::vector<float> bias;  // empty, or padded to a whole panel

  explicit Linear(int64_t in);
  ~Linear();

  bool is_integer() const { return !panels.empty(); }
};

// Plain pointers only: this is read by code that is compiled per instruction set.
struct LinearCall {
  const Part* parts;
  const Strip* strips;
  int64_t num_strips;
  int64_t strips_at_once;  // by as many threads
  const float* bias;  // null when absent
  int64_t in_features;
  int64_t out_features;
  int64_t num_tiles;
  const void* x;     // prepared activations
  int64_t x_stride;  // elements between rows, where rows are kept whole
  void* y;
  Dtype y_dtype;
  bool adds;         // to y, after rounding
};

}  // namespace penstock
