#include "common.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

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

void touch_pages(void* data, size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  madvise(data, bytes, MADV_POPULATE_WRITE);
#else
  (void)data;
  (void)bytes;
#endif
}

void free_pages(void* data, size_t bytes) {
  if (data != nullptr) munmap(data, bytes);
}

namespace {

// Memory that is handed out in pieces. The arena is freed with the last piece.
struct Arena {
  uint8_t* data;
  size_t bytes;
  size_t used;
  size_t pieces;
};

constexpr size_t kArenaBytes = size_t{32} << 20;
std::mutex arenas_mutex;
std::vector<Arena> arenas;

bool holds(const Arena& arena, const void* data) {
  return data >= arena.data && data < arena.data + arena.bytes;
}

}  // namespace

void* allocate_shared(size_t bytes) {
  bytes = static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 64));
  std::lock_guard<std::mutex> lock(arenas_mutex);
  if (arenas.empty() || arenas.back().used + bytes > arenas.back().bytes) {
    const size_t wanted = std::max(bytes, kArenaBytes);
    uint8_t* data = static_cast<uint8_t*>(allocate_pages(wanted));
    if (data == nullptr) return nullptr;
    arenas.push_back({data, wanted, 0, 0});
  }
  Arena& arena = arenas.back();
  void* piece = arena.data + arena.used;
  arena.used += bytes;
  arena.pieces += 1;
  return piece;
}

void free_shared(void* data) {
  std::lock_guard<std::mutex> lock(arenas_mutex);
  const auto arena = std::find_if(arenas.begin(), arenas.end(), [&](const Arena& a) { return holds(a, data); });
  if (arena == arenas.end() || --arena->pieces > 0) return;
  free_pages(arena->data, arena->bytes);
  arenas.erase(arena);
}

}  // namespace penstock
