// Norms and activations over whole batches. Small ones stay on the calling thread.
#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "pool.h"

namespace penstock {
namespace {

// Below this many elements waking other threads costs more than it saves.
constexpr int64_t kSerialElements = 16384;
constexpr int64_t kElementsPerItem = 8192;

template <typename Body>
void for_rows(int64_t rows, int64_t width, Body&& body) {
  if (rows * width <= kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  const int64_t rows_per_item = std::max<int64_t>(1, kElementsPerItem / width);
  parallel_for(ceil_div(rows, rows_per_item), [&](int64_t item) {
    const int64_t end = std::min(rows, (item + 1) * rows_per_item);
    for (int64_t row = item * rows_per_item; row < end; ++row) body(row);
  });
}

int64_t row_bytes(Dtype dtype, int64_t width) { return width * (dtype == Dtype::float32 ? 4 : 2); }

template <typename T>
T* offset(T* base, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const uint8_t, uint8_t>;
  return static_cast<Byte*>(base) + bytes;
}

}  // namespace
}  // namespace penstock

using penstock::Dtype;

PENSTOCK_API void penstock_rms_norm(int dtype, int64_t rows, int64_t width, const void* x, int weight_dtype,
                                    const void* weight, float eps, void* y) {
  const penstock::ElementwiseArgs args = {static_cast<Dtype>(dtype), width, eps, static_cast<Dtype>(weight_dtype),
                                          weight};
  const int64_t stride = penstock::row_bytes(args.dtype, width);
  const auto norm = penstock::kernels().rms_norm;
  penstock::for_rows(rows, width, [&](int64_t row) {
    norm(args, penstock::offset(x, row * stride), penstock::offset(y, row * stride));
  });
}

PENSTOCK_API void penstock_add_rms_norm(int dtype, int64_t rows, int64_t width, const void* x, void* residual,
                                        int weight_dtype, const void* weight, float eps, void* y) {
  const penstock::ElementwiseArgs args = {static_cast<Dtype>(dtype), width, eps, static_cast<Dtype>(weight_dtype),
                                          weight};
  const int64_t stride = penstock::row_bytes(args.dtype, width);
  const auto norm = penstock::kernels().add_rms_norm;
  penstock::for_rows(rows, width, [&](int64_t row) {
    norm(args, penstock::offset(x, row * stride), penstock::offset(residual, row * stride),
         penstock::offset(y, row * stride));
  });
}

PENSTOCK_API void penstock_gated(int dtype, int activation, int64_t rows, int64_t width, const void* gate_up,
                                 void* y) {
  const Dtype type = static_cast<Dtype>(dtype);
  const int64_t stride = penstock::row_bytes(type, width);
  const auto gate = penstock::kernels().gated;
  penstock::for_rows(rows, width, [&](int64_t row) {
    gate(type, static_cast<penstock::Activation>(activation), width, penstock::offset(gate_up, row * 2 * stride),
         penstock::offset(y, row * stride));
  });
}
