// Products in whole numbers, for weights that come quantized: 8 bits a weight with a scale for each output, 8 bits an
// activation with a scale for each row.
//
// Rows of activations have outliers, and a scale that reaches those would leave little of the rest. So every 64 inputs
// are rotated, by a Hadamard transform (`rotation_impl.h`), before they are rounded, and so are the weights: products
// stay what they were, and an outlier is spread over 64 codes.
//
// A code of an activation is kept as a byte with 128 added. Rows go in blocks of 16: for each 64 inputs of a block there
// is a tile [16 rows][64 inputs]. Products are summed exactly, and an output's offset takes 128 times the sum of its
// codes away again.
//
// Outputs are cut into panels of 16 and inputs into tiles of 64. A tile is 1024 bytes, [16 quads of inputs][16 outputs]
// [4 inputs], padded with zeros: an operand of an AMX product as it stands, and a run of operands of VNNI's. The tiles
// of a panel follow each other, so that any two panels can be multiplied side by side.
#pragma once

#include "common.h"
#include "linear.h"

namespace penstock {

constexpr int64_t kIntegerTileInputs = 64;  // and the inputs of one rotation
constexpr int64_t kIntegerTileBytes = kPanelOutputs * kIntegerTileInputs;
constexpr int64_t kQuadInputs = 4;
constexpr int64_t kQuadBytes = kPanelOutputs * kQuadInputs;
constexpr int64_t kIntegerBlockRows = 16;
constexpr int64_t kRowsAtOnce = 2 * kIntegerBlockRows;
constexpr int64_t kCodesTileBytes = kIntegerBlockRows * kIntegerTileInputs;
constexpr int32_t kCodeOffset = 128;
constexpr float kLargestIntegerCode = 127.0f;
// With more inputs than this a sum could overflow.
constexpr int64_t kMostIntegerInputs = 65536;

// Two panels that are multiplied together, and the tiles that the thread will probably read next.
struct PanelPair {
  const Panel* panel[2];  // the second is null where a stack ends with an odd one
  const uint8_t* next[2];
};

// Plain pointers only: this is read by code that is compiled per instruction set.
struct IntegerCall {
  const float* bias;  // null when absent
  int64_t num_tiles;  // per panel
  int64_t out_features;
  uint8_t* codes;
  float* row_scales;
  void* y;
  Dtype y_dtype;
  bool adds;  // to y, after rounding

  uint8_t* row_codes(int64_t row) const {
    const int64_t block = row / kIntegerBlockRows;
    return codes + block * num_tiles * kCodesTileBytes + row % kIntegerBlockRows * kIntegerTileInputs;
  }
};

// What some rows and a pair of panels sum up to.
struct alignas(64) IntegerSums {
  int32_t of[2][kRowsAtOnce][kPanelOutputs];
};

}  // namespace penstock
