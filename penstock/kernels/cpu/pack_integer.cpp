// Rotating quantized matrices, rounding them to 8 bits with one scale for each output, and packing them. See integer.h.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "integer.h"
#include "kernels.h"
#include "pool.h"

namespace penstock {
namespace {

// What Python hands over: row-major codes of a byte each, and tables in float32, [rows][in_features / group].
struct GroupCodes {
  const void* codes;
  bool is_signed;
  const float* scales;
  const float* offsets;  // may be null
  int64_t in_features;
  int64_t group;
};

template <typename Code>
void widen_row(const GroupCodes& source, int64_t row, float* to) {
  const Code* codes = static_cast<const Code*>(source.codes) + row * source.in_features;
  const int64_t groups = source.in_features / source.group;
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = source.scales[row * groups + g];
    const float offset = source.offsets == nullptr ? 0.0f : source.offsets[row * groups + g];
    for (int64_t k = g * source.group; k < (g + 1) * source.group; ++k) {
      to[k] = static_cast<float>(codes[k]) * scale + offset;
    }
  }
}

float largest_magnitude(const float* row, int64_t count) {
  float largest = 0.0f;
  for (int64_t k = 0; k < count; ++k) largest = std::max(largest, std::fabs(row[k]));
  return largest;
}

// Returns the sum of the codes.
int32_t pack_row(const float* row, int64_t count, float inverse, int64_t lane, uint8_t* tiles) {
  constexpr float rounder = 12582912.0f;  // adding it leaves the nearest integer in the lowest bits
  int32_t sum = 0;
  for (int64_t k = 0; k < count; ++k) {
    const float shifted = row[k] * inverse + rounder;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const int8_t code = static_cast<int8_t>(bits);
    sum += code;
    tiles[k / kQuadInputs * kQuadBytes + lane * kQuadInputs + k % kQuadInputs] = static_cast<uint8_t>(code);
  }
  return sum;
}

void pack_panel(const Part& part, const GroupCodes& source, int64_t panel) {
  static thread_local std::vector<float> row;
  const int64_t count = part.num_tiles * kIntegerTileInputs;
  uint8_t* tiles = part.data + panel * part.num_tiles * kIntegerTileBytes;
  const int64_t end = std::min((panel + 1) * kPanelOutputs, part.rows);
  for (int64_t output = panel * kPanelOutputs; output < end; ++output) {
    row.assign(static_cast<size_t>(count), 0.0f);
    source.is_signed ? widen_row<int8_t>(source, output, row.data()) : widen_row<uint8_t>(source, output, row.data());
    kernels().rotate_row(row.data(), part.num_tiles);
    const float largest = largest_magnitude(row.data(), count);
    const float inverse = largest > 0 ? kLargestIntegerCode / largest : 0.0f;
    // A product of two rotated rows is 64 times that of the rows.
    part.row_scales()[output] = largest / kLargestIntegerCode / kIntegerTileInputs;
    const int32_t sum = pack_row(row.data(), count, inverse, output % kPanelOutputs, tiles);
    part.code_offsets()[output] = -kCodeOffset * sum;
  }
}

}  // namespace
}  // namespace penstock

using namespace penstock;

PENSTOCK_API int64_t penstock_most_integer_inputs() { return kMostIntegerInputs; }

// For a stack of such parts alone. `offsets` may be null. Returns the bytes held, or 0 when there is no memory.
PENSTOCK_API int64_t penstock_linear_add_rounded(Linear* linear, int64_t rows, const void* codes, int is_signed,
                                                 const float* scales, const float* offsets, int64_t group) {
  Part part = {};
  part.format = Format::int8_rows;
  part.rows = rows;
  part.first_output = linear->out_features;
  part.num_panels = ceil_div(rows, kPanelOutputs);
  part.num_tiles = ceil_div(linear->in_features, kIntegerTileInputs);
  part.tile_bytes = kIntegerTileBytes;
  const int64_t table_bytes = 2 * part.num_panels * kPanelOutputs * static_cast<int64_t>(sizeof(float));
  part.data_bytes = static_cast<size_t>(part.num_panels * part.num_tiles * kIntegerTileBytes + table_bytes);
  part.data = static_cast<uint8_t*>(allocate_shared(part.data_bytes));
  if (part.data == nullptr) return 0;

  const GroupCodes source = {codes, is_signed != 0, scales, offsets, linear->in_features, group};
  parallel_for(part.num_panels, [&](int64_t panel) { pack_panel(part, source, panel); });
  for (int64_t panel = 0; panel < part.num_panels; ++panel) {
    const int64_t first = panel * kPanelOutputs;
    linear->panels.push_back({part.data + panel * part.num_tiles * kIntegerTileBytes, part.row_scales() + first,
                              part.code_offsets() + first, part.first_output + first,
                              std::min<int64_t>(kPanelOutputs, rows - first)});
  }
  linear->parts.push_back(part);
  linear->out_features += rows;
  return static_cast<int64_t>(part.data_bytes);
}
