// Products in whole numbers, for weights that come quantized. Weights keep the codes, scales and offsets that they come
// with. Every 32 activations of a row are rounded to 16-bit codes with one scale. A code is stored as a word, or as two
// signed bytes: code = 256 × high + low.
//
// Outputs are cut into panels of 16 and inputs into tiles of 32. The tiles of a panel follow each other in memory. A
// tile holds scales and offsets as in linear.h, then the codes as [8 quads][16 outputs][4 inputs]: 512 bytes of 8-bit
// codes, or 256 bytes of 4-bit codes, in which byte i of quad q holds quad q in its lower half and quad q + 4 in its
// upper half. Padding has codes, scales and offsets of zero.
//
// The sum of code × code over a group of inputs is exact and is rounded once, to float32. An output adds the scaled
// sums of its groups in the order of the inputs, so its bits depend neither on the other rows nor on the way in which a
// processor multiplies the codes.
#pragma once

#include "common.h"
#include "linear.h"

namespace penstock {

constexpr int64_t kQuadInputs = 4;
constexpr int64_t kQuadBytes = kPanelOutputs * kQuadInputs;
constexpr int64_t kQuadsPerTile = kTileInputs / kQuadInputs;
constexpr int64_t kRowTileBytes = 2 * kTileInputs;       // the codes of a row's 32 activations
constexpr float kLargestCode = 127.0f * 256.0f + 127.0f;  // the largest whose two bytes are both at most 127

constexpr int64_t kBytesOnly = int64_t{1} << 62;  // more rows than there are: an engine that never reads words

// 8-bit weight codes are stored with this added: the byte products of x86 take weights without a sign, and the byte
// products of ARM take weights with a sign.
#if defined(__x86_64__)
constexpr int32_t kCodeBias = 128;
#else
constexpr int32_t kCodeBias = 0;
#endif

// The scale and the sums of 32 activations of a row.
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
  int8_t* bytes;         // [rows][tiles][32 high bytes, 32 low bytes], or null
  int16_t* words;        // [rows][tiles][32], or null
  RoundedGroup* groups;  // [rows][tiles]
  void* y;
  Dtype y_dtype;
  bool adds;  // to y, after rounding

  // One line more than a row needs: rows of a power of two would share the places of the nearest cache.
  int64_t row_stride() const { return num_tiles * kRowTileBytes + 64; }
  int8_t* row_bytes(int64_t row) const { return bytes + row * row_stride(); }
  int16_t* row_words(int64_t row) const { return words + row * row_stride() / 2; }
  RoundedGroup* row_groups(int64_t row) const { return groups + row * num_tiles; }
};

// The form of the weights' codes: packed, with two codes in a byte or as bytes with the bias added; or unpacked in
// the order that an engine reads.
enum class CodeKind { nibbles, bytes, unpacked };

// Neighbouring tiles of a panel, packed or unpacked.
struct TileRun {
  const uint8_t* data;  // the first tile, which begins with its scales
  int64_t step;         // bytes from one tile to the next
  int64_t offsets_at;
  int64_t codes_at;
  int64_t first_tile;
  int64_t num_tiles;
  bool half_scales;
  bool has_offsets;
  const uint8_t* next;  // packed tiles that are needed behind these unpacked ones, or null
  int64_t next_step;
};

}  // namespace penstock
