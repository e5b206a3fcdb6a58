#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common.h"

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough for the caller's work between two operations of a step, short enough to waste little time.
constexpr auto kSpinTime = std::chrono::microseconds(60);
// With more threads than cores, the thread that this thread waits for may need the core.
constexpr int kPausesBeforeYield = 64;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether to count on the workers. When the system gives a worker's core to another process in the middle of an item,
// the caller can only wait, often for milliseconds. After such a wait the caller works alone for a while, and for
// longer if the next attempt ends in such a wait too.
class Patience {
 public:
  bool exhausted() const { return lost_ && Clock::now() < alone_until_; }

  void note_wait(Clock::time_point start) {
    const auto now = Clock::now();
    if (now - start < kLongWait) return;
    const bool again = lost_ && now - alone_until_ < kRecovery;
    alone_for_ = again ? std::min(2 * alone_for_, kLongestAlone) : kShortestAlone;
    alone_until_ = now + alone_for_;
    lost_ = true;
  }

 private:
  using Duration = Clock::duration;
  static constexpr Duration kLongWait = std::chrono::microseconds(4000);
  static constexpr Duration kShortestAlone = std::chrono::milliseconds(10);
  static constexpr Duration kLongestAlone = std::chrono::milliseconds(200);
  static constexpr Duration kRecovery = std::chrono::milliseconds(50);
  bool lost_ = false;
  Duration alone_for_ = kShortestAlone;
  Clock::time_point alone_until_;
};

constexpr int64_t kMostRanges = 64;

struct alignas(64) NextItem {
  std::atomic<int64_t> item{0};
};

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this, i] { work(i + 1); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      stopping_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  void run(int64_t items, ItemFunction function, const void* context, int64_t ranges) {
    function_ = function;
    context_ = context;
    items_ = items;
    ranges_ = std::clamp<int64_t>(ranges, 1, kMostRanges);
    for (int64_t r = 0; r < ranges_; ++r) next_[r].item.store(first_item(r), std::memory_order_relaxed);
    gate_.fetch_and(~kClosed, std::memory_order_release);
    epoch_.fetch_add(1);
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_mutex_); }
      wake_.notify_all();
    }
    take_items(0);
    gate_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int pauses = 0; occupied() && pauses < kPausesBeforeYield; ++pauses) pause_briefly();
    if (!occupied()) return;
    const auto start = Clock::now();
    while (occupied()) sched_yield();
    patience_.note_wait(start);
  }

  bool ready() const { return !threads_.empty() && !patience_.exhausted(); }

 private:
  // The gate counts the workers inside a region. A worker that finds the gate closed does not touch the job. The
  // caller may therefore rewrite the job once the gate is closed and empty.
  static constexpr int32_t kClosed = 1 << 30;

  bool occupied() const { return (gate_.load(std::memory_order_acquire) & ~kClosed) != 0; }

  int64_t first_item(int64_t range) const { return range * items_ / ranges_; }

  void take_items(int64_t thread) {
    for (int64_t r = 0; r < ranges_; ++r) {
      const int64_t range = (thread + r) % ranges_, end = first_item(range + 1);
      std::atomic<int64_t>& next = next_[range].item;
      for (int64_t item = next.fetch_add(1, std::memory_order_relaxed); item < end;
           item = next.fetch_add(1, std::memory_order_relaxed)) {
        function_(context_, item);
      }
    }
  }

  void work(int64_t thread) {
    uint32_t seen = 0;
    for (;;) {
      await_change(seen);
      seen = epoch_.load(std::memory_order_acquire);
      if (stopping_) return;
      if ((gate_.fetch_add(1, std::memory_order_acq_rel) & kClosed) == 0) take_items(thread);
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  void await_change(uint32_t seen) {
    for (int pauses = 0; pauses < kPausesBeforeYield; ++pauses) {
      if (epoch_.load(std::memory_order_acquire) != seen) return;
      pause_briefly();
    }
    const auto deadline = Clock::now() + kSpinTime;
    do {
      if (epoch_.load(std::memory_order_acquire) != seen) return;
      sched_yield();
    } while (Clock::now() < deadline);
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return epoch_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  ItemFunction function_ = nullptr;
  const void* context_ = nullptr;
  int64_t items_ = 0;
  int64_t ranges_ = 1;
  NextItem next_[kMostRanges];
  alignas(64) std::atomic<int32_t> gate_{kClosed};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  Patience patience_;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

std::mutex region_mutex;  // held by the one caller that has the workers

// Leaked at exit on purpose: joining threads while the process is torn down can hang.
Pool*& shared_pool() {
  static Pool* pool = new Pool(static_cast<int>(std::thread::hardware_concurrency()) - 1);
  return pool;
}

}  // namespace

void run_items(int64_t items, ItemFunction function, const void* context, int64_t ranges) {
  if (items > 1) {
    std::unique_lock<std::mutex> lock(region_mutex, std::try_to_lock);
    if (lock.owns_lock() && shared_pool()->ready()) {
      shared_pool()->run(items, function, context, ranges);
      return;
    }
  }
  for (int64_t item = 0; item < items; ++item) function(context, item);
}

int num_threads() { return shared_pool()->num_threads(); }

void set_num_threads(int count) {
  std::lock_guard<std::mutex> lock(region_mutex);
  if (count < 1 || count == shared_pool()->num_threads()) return;
  delete shared_pool();
  shared_pool() = new Pool(count - 1);
}

}  // namespace penstock

PENSTOCK_API int penstock_num_threads() { return penstock::num_threads(); }
PENSTOCK_API void penstock_set_num_threads(int count) { penstock::set_num_threads(count); }
