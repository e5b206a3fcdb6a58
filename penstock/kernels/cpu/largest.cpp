#include "largest.h"

#include <algorithm>
#include <cmath>

#include "product.h"

namespace penstock {
namespace {

// A key that integers can compare: the value in the upper half, and the output in the lower half, the first output
// being the largest. The same output therefore wins, whatever the order in which threads finish.
constexpr uint32_t kSign = 0x80000000u;
constexpr uint64_t kNotANumber = ~uint64_t{0};

uint64_t make_key(float value, int64_t output) {
  const float unsigned_zero = value + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &unsigned_zero, sizeof bits);
  const uint32_t ordered = bits & kSign ? ~bits : bits | kSign;
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(output);
}

float value_of(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  const uint32_t bits = ordered & kSign ? ordered & ~kSign : ~ordered;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void raise_to(std::atomic<uint64_t>& best, uint64_t key) {
  uint64_t seen = best.load(std::memory_order_relaxed);
  while (seen < key && !best.compare_exchange_weak(seen, key, std::memory_order_relaxed)) {
  }
}

}  // namespace

void LargestOutputs::look_through(const ProductPiece& piece, const float* y) {
  const int64_t width = piece.width();
  for (int64_t row = piece.first_row; row < piece.end_row; ++row, y += width) {
    std::atomic<uint64_t>& best = best_[static_cast<size_t>(row)];
    const float highest = kernels().find_maximum(y, width);
    if (std::isnan(highest)) {
      best.store(kNotANumber, std::memory_order_relaxed);
    } else if (make_key(highest, 0) > best.load(std::memory_order_relaxed)) {
      raise_to(best, make_key(highest, piece.first_output + (std::find(y, y + width, highest) - y)));
    }
  }
}

void LargestOutputs::write(int64_t* outputs) const {
  for (const std::atomic<uint64_t>& best : best_) {
    const uint64_t key = best.load(std::memory_order_relaxed);
    const bool usable = key != kNotANumber && std::isfinite(value_of(key));
    *outputs++ = usable ? static_cast<int64_t>(~static_cast<uint32_t>(key)) : -1;
  }
}

}  // namespace penstock

using namespace penstock;

// Finds the largest output of each row: of logits, the token of greedy sampling.
PENSTOCK_API void penstock_largest(const Linear* linear, int dtype, int64_t rows, const void* x, int64_t* outputs) {
  LargestOutputs largest(rows);
  find_largest(*linear, static_cast<Dtype>(dtype), rows, InputRows::given(x), &largest);
  largest.write(outputs);
}
