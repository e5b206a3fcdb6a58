#include "common.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace penstock {

Scratch::~Scratch() { std::free(data_); }

void* Scratch::reserve(size_t bytes) {
  if (bytes > capacity_) {
    std::free(data_);
    capacity_ = 0;
    data_ = nullptr;
    const size_t wanted = static_cast<size_t>(round_up(static_cast<int64_t>(bytes + bytes / 4), 4096));
    if (posix_memalign(&data_, 64, wanted) != 0) throw std::bad_alloc();
    capacity_ = wanted;
  }
  return data_;
}

void* allocate_pages(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  constexpr size_t huge_page_bytes = size_t{2} << 20;
  if (bytes >= huge_page_bytes) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return data;
}

void free_pages(void* data, size_t bytes) {
  if (data != nullptr) munmap(data, bytes);
}

}  // namespace penstock
