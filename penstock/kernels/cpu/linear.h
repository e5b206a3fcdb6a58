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
// Stacks that are multiplied in whole numbers have another order, which is in integer.h.
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

enum class Format : int32_t { float32 = 0, bfloat16 = 1, int8 = 2, int4 = 3 };

struct Part {
  Format format;
  bool half_scales;
  bool has_offsets;
  bool is_integer;  // in the order of integer.h
  int32_t groups_per_tile;  // 0 when not quantized
  int64_t rows;
  int64_t first_output;
  int64_t num_panels;
  int64_t num_tiles;  // per panel
  int64_t tile_bytes;
  uint8_t* data;
  size_t data_bytes;

  int64_t table_bytes() const { return groups_per_tile * kPanelOutputs * (half_scales ? 2 : 4); }
  int64_t codes_at() const { return table_bytes() * (has_offsets ? 2 : 1); }
  // A panel's first tile, and the distance from one of its tiles to the next.
  uint8_t* panel(int64_t index) const {
    if (is_integer) return data + index * num_tiles * tile_bytes;
    const int64_t strip = index / kStripPanels;
    return data + strip * kStripPanels * num_tiles * tile_bytes + index % kStripPanels * tile_bytes;
  }
  int64_t tile_step(int64_t index) const {
    if (is_integer) return tile_bytes;
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

// Sixteen outputs of a part in the order of integer.h; fewer at the end of the part.
struct Panel {
  int32_t part;
  const uint8_t* tiles;
  int64_t first_output;
  int64_t num_outputs;
};

struct Linear {
  int64_t in_features;
  int64_t out_features = 0;
  int64_t num_tiles;  // per panel
  std::vector<Part> parts;
  std::vector<Strip> strips;  // of parts in the order above
  std::vector<Panel> panels;  // of parts in the order of integer.h
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
