// Remembers the tile shapes of each thread, so that the same shapes are not loaded again. Other code on the calling
// thread, such as the matrix products of torch, also changes the shapes: every call from Python begins without
// remembered shapes.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace penstock {
namespace amx {

struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

inline thread_local TileShapes shapes_in_force = {0};

static inline void use_tiles(const TileShapes& shapes) {
  if (std::memcmp(&shapes, &shapes_in_force, sizeof shapes) == 0) return;
  shapes_in_force = shapes;
  _tile_loadconfig(&shapes);
}

}  // namespace amx
}  // namespace penstock
