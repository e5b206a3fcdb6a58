// Products in whole numbers, for weights that come quantized: 8 bits a weight with a scale for each output, 16 bits an
// activation with a scale for each row.
//
// An activation is kept as two bytes, of which a processor multiplies 64 at a time: x = scale × (256 × high + low -
// 32768). Rows go in blocks of 16: for each 64 inputs of a block there is a tile of high bytes [16 rows][64 inputs],
// then one of low bytes. The products of each plane are summed exactly; the offset takes 32768 times the sum of an
// output's codes away again.
//
// Outputs are cut into panels of 16 and inputs into tiles of 64. A tile is 1024 bytes, [16 quads of inputs][16 outputs]
// [4 inputs], padded with zeros: an operand of an AMX product as it stands, and a run of operands of VNNI's. The tiles
// of a panel follow each other, so that any two panels can be multiplied side by side.
#pragma once

#include "common.h"
#include "linear.h"

namespace penstock {

constexpr int64_t kIntegerTileInputs = 64;
constexpr int64_t kIntegerTileBytes = kPanelOutputs * kIntegerTileInputs;
constexpr int64_t kQuadInputs = 4;
constexpr int64_t kQuadBytes = kPanelOutputs * kQuadInputs;
constexpr int64_t kIntegerBlockRows = 16;
constexpr int64_t kPlaneTileBytes = kIntegerBlockRows * kIntegerTileInputs;
constexpr int64_t kPlanesStep = 2 * kPlaneTileBytes;  // from one tile of a block to the next
constexpr int32_t kHighOffset = 128;  // 32768 / 256
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
  uint8_t* planes;
  float* row_scales;
  void* y;
  Dtype y_dtype;
  bool adds;  // to y, after rounding

  // The first high byte of a row; the low one is a tile further.
  uint8_t* row_planes(int64_t row) const {
    const int64_t block = row / kIntegerBlockRows;
    return planes + block * num_tiles * kPlanesStep + row % kIntegerBlockRows * kIntegerTileInputs;
  }
};

// What a block of rows and a pair of panels sum up to: [panel][plane: high, low][row][output].
struct alignas(64) IntegerSums {
  int32_t of[2][2][kIntegerBlockRows][kPanelOutputs];
};

}  // namespace penstock
