// Products in whole numbers, for weights that come quantized. Weights keep the codes, scales and offsets that they come
// with. A row of activations becomes two rows of bytes: every 32 inputs rounded to 8 bits with a scale of their own, and
// what that rounding left, rounded in the same way. Together they keep about 16 bits of each input.
//
// Outputs are cut into panels of 16 and inputs into tiles of 32. The tiles of a panel follow each other in memory. A tile
// holds scales and offsets as in linear.h, then the codes as [8 quads][16 outputs][4 inputs]: 512 bytes of 8-bit codes,
// or 256 bytes of 4-bit codes, in which byte i of quad q holds quad q in its lower half and quad q + 4 in its upper half.
// Padding has codes, scales and offsets of zero.
//
// The sum of code × code over a group of inputs is exact. An output adds the scaled sums of its groups in the order of
// the inputs, so its bits depend neither on the other rows nor on the way in which a processor multiplies bytes.
#pragma once

#include "common.h"
#include "linear.h"

namespace penstock {

constexpr int64_t kQuadInputs = 4;
constexpr int64_t kQuadBytes = kPanelOutputs * kQuadInputs;
constexpr int64_t kQuadsPerTile = kTileInputs / kQuadInputs;
constexpr int64_t kTerms = 2;        // rows of codes for each row of activations
constexpr int64_t kRowsAtOnce = 32;  // rows of codes
constexpr float kLargestCode = 127.0f;

// 8-bit codes are stored with this added: the byte products of x86 take weights without a sign, and the byte products of ARM take weights with a sign.
#if defined(__x86_64__)
constexpr int32_t kCodeBias = 128;
#else
constexpr int32_t kCodeBias = 0;
#endif

// What is known of 32 activations of a row besides their codes.
struct RoundedGroup {
  float scale;
  float sum;                // of the rounded activations
  int32_t code_sum;
  int32_t first_code_sum;   // of the first 16
};

// Plain pointers only: this is read by code that is compiled per instruction set.
struct IntegerCall {
  const Part* parts;
  const float* bias;  // null when absent
  int64_t num_tiles;
  int64_t out_features;
  int8_t* codes;         // [rows of codes][tiles][32]
  RoundedGroup* groups;  // [rows of codes][tiles]
  void* y;
  Dtype y_dtype;
  bool adds;  // to y, after rounding

  // `row` counts rows of codes: activation row r has the rows r * kTerms and r * kTerms + 1.
  int8_t* row_codes(int64_t row) const { return codes + row * num_tiles * kTileInputs; }
  RoundedGroup* row_groups(int64_t row) const { return groups + row * num_tiles; }
};

// How the codes of a panel are stored: two in a byte, as bytes of four bits, or as bytes of eight with the bias added.
enum class CodeKind { nibbles, small_bytes, bytes };

struct PanelCodes {
  const uint8_t* data;
  int64_t step;  // bytes from one tile to the next
};

}  // namespace penstock
