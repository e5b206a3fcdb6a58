// Finds the largest output of a product for every row, piece by piece while a piece is in a core's cache, so that the
// product as a whole is never in memory.
#pragma once

#include <atomic>
#include <vector>

#include "common.h"

namespace penstock {

// Rows and outputs of a product, from the first to before the end.
struct ProductPiece {
  int64_t first_row;
  int64_t end_row;
  int64_t first_output;
  int64_t end_output;

  int64_t width() const { return end_output - first_output; }
};

class LargestOutputs {
 public:
  explicit LargestOutputs(int64_t rows) : best_(static_cast<size_t>(rows)) {}

  // multiply(call) has to write the piece where the call says. For several threads at once.
  template <typename Call, typename Multiply>
  void take(Call call, const ProductPiece& piece, const Multiply& multiply) {
    static thread_local Scratch scratch;
    float* y = scratch.get<float>((piece.end_row - piece.first_row) * piece.width());
    call.out_features = piece.width();
    // Output j of row i is written at i × width + j.
    const int64_t skipped = piece.first_row * piece.width() + piece.first_output;
    call.y = reinterpret_cast<void*>(reinterpret_cast<intptr_t>(y) - skipped * static_cast<int64_t>(sizeof(float)));
    call.y_dtype = Dtype::float32;
    multiply(call);
    look_through(piece, y);
  }

  // The first of a row's largest; -1 where an output is not a number or none is finite.
  void write(int64_t* outputs) const;

 private:
  void look_through(const ProductPiece& piece, const float* y);

  std::vector<std::atomic<uint64_t>> best_;  // larger is better: see largest.cpp
};

}  // namespace penstock
