// A small fork-join pool. Work items are handed out one by one: a thread that loses its core delays a region by at
// most one item. Idle workers spin for a moment, then sleep.
#pragma once

#include <cstdint>

namespace penstock {

using ItemFunction = void (*)(const void* context, int64_t item);

// Runs function(context, i) for every i in [0, items), on the caller and whichever workers arrive in time.
// Several threads may call at once: one caller gets the workers, and the other callers run their items alone.
//
// Items may be divided into equal ranges. Each thread begins with the same range in every call, and then helps the
// other threads. The data of a range therefore stays in the cache of one core from call to call.
void run_items(int64_t items, ItemFunction function, const void* context, int64_t ranges = 1);

template <typename Body>
void parallel_for(int64_t items, const Body& body, int64_t ranges = 1) {
  run_items(
      items, [](const void* context, int64_t item) { (*static_cast<const Body*>(context))(item); }, &body, ranges);
}

int num_threads();
void set_num_threads(int count);

}  // namespace penstock
