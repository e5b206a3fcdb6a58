// Types and small helpers every file of the CPU backend shares. Nothing here depends on an instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

namespace penstock {

using bf16 = uint16_t;  // the upper half of a float32

// Numbers shared with native.py.
enum class Dtype : int32_t { float32 = 0, bfloat16 = 1 };
enum class Activation : int32_t { silu = 0, gelu_tanh = 1 };

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// A grow-only, cache-line aligned buffer. Contents do not survive growth.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  template <typename T>
  __attribute__((always_inline)) T* get(int64_t count) {
    return static_cast<T*>(reserve(static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  void* reserve(size_t bytes);
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

// Allocates large, long-lived memory, aligned to huge pages and advised to use them. The system zeroes pages when
// they are first used. Returns null when there is no memory.
void* allocate_pages(size_t bytes);
// Lets the system zero the pages now, if the system can. Otherwise the first thread that uses a page waits.
void touch_pages(void* data, size_t bytes);
void free_pages(void* data, size_t bytes);

// The same for pieces smaller than a huge page, which share some. Zeroed, cache-line aligned.
void* allocate_shared(size_t bytes);
void free_shared(void* data);

}  // namespace penstock
