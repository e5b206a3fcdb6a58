// Packing matrices into panels of tiles. See linear.h for the layout.
#include <algorithm>
#include <new>

#include "integer.h"
#include "linear.h"
#include "pool.h"

namespace penstock {
namespace {

// What Python hands over: a row-major matrix, and tables of scales and offsets of the same type.
struct Source {
  const void* values;
  const uint8_t* scales;
  const uint8_t* offsets;
  int64_t rows;
  int64_t in_features;
  int64_t group;
};

int64_t code_bytes(Format format) {
  switch (format) {
    case Format::float32: return kTileElements * 4;
    case Format::bfloat16: return kTileElements * 2;
    case Format::int8: return kTileElements;
    case Format::int4: return kTileElements / 2;
  }
  return 0;
}

template <typename Element>
void pack_elements(const Source& source, int64_t row, int64_t lane, int64_t input, int64_t count, uint8_t* codes) {
  const Element* from = static_cast<const Element*>(source.values) + row * source.in_features + input;
  std::copy(from, from + count, reinterpret_cast<Element*>(codes) + lane * kTileInputs);
}

void pack_nibbles(const Source& source, int64_t row, int64_t lane, int64_t input, int64_t count, uint8_t* codes) {
  const uint8_t* from = static_cast<const uint8_t*>(source.values) + row * source.in_features + input;
  uint16_t* words = reinterpret_cast<uint16_t*>(codes) + lane / 4 * kTileInputs;
  for (int64_t k = 0; k < count; ++k) words[k] |= static_cast<uint16_t>((from[k] & 15) << (lane % 4 * 4));
}

void pack_table(const Part& part, const Source& source, const uint8_t* table, int64_t row, int64_t lane, int64_t input,
                uint8_t* to) {
  const int64_t width = part.half_scales ? 2 : 4;
  const int64_t groups = source.in_features / source.group;
  for (int64_t g = 0; g < part.groups_per_tile; ++g) {
    const int64_t group = input / source.group + g;
    if (group >= groups) break;
    std::memcpy(to + (g * kPanelOutputs + lane) * width, table + (row * groups + group) * width,
                static_cast<size_t>(width));
  }
}

// In quads, see integer.h.
void pack_quads(const Source& source, bool nibbles, int64_t row, int64_t lane, int64_t input, int64_t count,
                uint8_t* codes) {
  const uint8_t* from = static_cast<const uint8_t*>(source.values) + row * source.in_features + input;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t quad = k / kQuadInputs, at = lane * kQuadInputs + k % kQuadInputs;
    if (nibbles) {
      codes[quad % 4 * kQuadBytes + at] |= static_cast<uint8_t>((from[k] & 15) << (quad < 4 ? 0 : 4));
    } else {
      codes[quad * kQuadBytes + at] = static_cast<uint8_t>(from[k] ^ kCodeBias);
    }
  }
}

void pack_row_of_tile(const Part& part, const Source& source, int64_t row, int64_t lane, int64_t input,
                      uint8_t* tile) {
  const int64_t count = std::min<int64_t>(kTileInputs, source.in_features - input);
  uint8_t* codes = tile + part.codes_at();
  if (part.groups_per_tile > 0) {
    pack_table(part, source, source.scales, row, lane, input, tile);
    if (part.has_offsets) pack_table(part, source, source.offsets, row, lane, input, tile + part.table_bytes());
  }
  if (part.is_integer) {
    return pack_quads(source, part.format == Format::int4, row, lane, input, count, codes);
  }
  switch (part.format) {
    case Format::float32: return pack_elements<float>(source, row, lane, input, count, codes);
    case Format::bfloat16: return pack_elements<bf16>(source, row, lane, input, count, codes);
    case Format::int8: return pack_elements<uint8_t>(source, row, lane, input, count, codes);
    case Format::int4: return pack_nibbles(source, row, lane, input, count, codes);
  }
}

void pack_panel(const Part& part, const Source& source, int64_t panel) {
  const int64_t first = panel * kPanelOutputs;
  const int64_t rows = std::min<int64_t>(kPanelOutputs, source.rows - first);
  uint8_t* tiles = part.panel(panel);
  const int64_t step = part.tile_step(panel);
  for (int64_t lane = 0; lane < rows; ++lane) {
    for (int64_t input = 0; input < source.in_features; input += kTileInputs) {
      pack_row_of_tile(part, source, first + lane, lane, input, tiles + input / kTileInputs * step);
    }
  }
}

void add_strips(Linear& linear, const Part& part, int32_t index) {
  for (int64_t panel = 0; panel < part.num_panels; panel += kStripPanels) {
    const int64_t panels = std::min<int64_t>(kStripPanels, part.num_panels - panel);
    const int64_t first = panel * kPanelOutputs;
    linear.strips.push_back({index, static_cast<int32_t>(panels), panel, part.first_output + first,
                             std::min<int64_t>(panels * kPanelOutputs, part.rows - first), part.panel(panel)});
  }
}

void add_panels(Linear& linear, const Part& part, int32_t index) {
  for (int64_t panel = 0; panel < part.num_panels; ++panel) {
    const int64_t first = panel * kPanelOutputs;
    linear.panels.push_back({index, part.panel(panel), part.first_output + first,
                             std::min<int64_t>(kPanelOutputs, part.rows - first)});
  }
}

}  // namespace

Linear::Linear(int64_t in) : in_features(in), num_tiles(ceil_div(in, kTileInputs)) {}

Linear::~Linear() {
  for (const Part& part : parts) free_shared(part.data);
}

}  // namespace penstock

using namespace penstock;

PENSTOCK_API Linear* penstock_linear_create(int64_t in_features) { return new (std::nothrow) Linear(in_features); }

PENSTOCK_API void penstock_linear_free(Linear* linear) { delete linear; }

// `scales` and `offsets` are null for a dense matrix; `offsets` may be null. Returns the bytes held, or 0 when there
// is no memory. With `is_integer`, which all parts of a stack share, the stack is multiplied in whole numbers.
PENSTOCK_API int64_t penstock_linear_add(Linear* linear, int format, int64_t rows, const void* values,
                                         const void* scales, const void* offsets, int half_scales, int64_t group,
                                         int is_integer) {
  Part part = {};
  part.format = static_cast<Format>(format);
  part.half_scales = half_scales != 0;
  part.has_offsets = offsets != nullptr;
  part.is_integer = is_integer != 0;
  part.groups_per_tile = scales == nullptr ? 0 : static_cast<int32_t>(kTileInputs / group);
  part.rows = rows;
  part.first_output = linear->out_features;
  part.num_panels = ceil_div(rows, kPanelOutputs);
  part.tile_bytes = part.codes_at() + code_bytes(part.format);
  part.num_tiles = linear->num_tiles;
  part.data_bytes = static_cast<size_t>(part.tile_bytes * part.num_tiles * part.num_panels);
  part.data = static_cast<uint8_t*>(allocate_shared(part.data_bytes));
  if (part.data == nullptr) return 0;

  const Source source = {values, static_cast<const uint8_t*>(scales),
                         static_cast<const uint8_t*>(offsets), rows, linear->in_features, group};
  parallel_for(part.num_panels, [&](int64_t panel) { pack_panel(part, source, panel); });
  linear->parts.push_back(part);
  linear->out_features += rows;
  const int32_t index = static_cast<int32_t>(linear->parts.size()) - 1;
  part.is_integer ? add_panels(*linear, part, index) : add_strips(*linear, part, index);
  return static_cast<int64_t>(part.data_bytes);
}

PENSTOCK_API void penstock_linear_set_bias(Linear* linear, const float* bias) {
  linear->bias.assign(static_cast<size_t>(linear->out_features) + kPanelOutputs, 0.0f);
  std::copy(bias, bias + linear->out_features, linear->bias.begin());
}

// The memory of one matrix of the stack, or of the bias behind the last matrix, for a copy from another process. Sets
// `kind` to a number that is the same for matrices of the same layout. Returns the bytes; 0 past the end.
PENSTOCK_API int64_t penstock_linear_memory(Linear* linear, int64_t index, void** data, int64_t* kind) {
  const int64_t num_parts = static_cast<int64_t>(linear->parts.size());
  if (index > num_parts || (index == num_parts && linear->bias.empty())) return 0;
  if (index == num_parts) {
    *data = linear->bias.data();
    *kind = -1;
    return static_cast<int64_t>(linear->bias.size() * sizeof(float));
  }
  const Part& part = linear->parts[static_cast<size_t>(index)];
  *data = part.data;
  *kind = static_cast<int64_t>(part.format) | part.half_scales << 8 | part.has_offsets << 9 | part.is_integer << 10 |
          part.groups_per_tile << 11 | part.rows << 16;
  return static_cast<int64_t>(part.data_bytes);
}
