// Samples tokens from rows of logits. sampling.py defines which tokens are kept and drawn; this code finds the same
// tokens without sorting the vocabulary.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace penstock {
namespace {

constexpr int64_t kUnusable = -1;

struct Candidate {
  float logit;
  int32_t id;
  float weight;
};

bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

struct Settings {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
  double uniform;
};

struct RowScratch {
  std::vector<float> block_maxima;
  std::vector<float> selection;
  std::vector<float> weights;
  std::vector<float> block_sums;
  std::vector<Candidate> candidates;  // in order of id
  std::vector<Candidate> ranking;
};

uint64_t mix(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

double uniform_draw(int64_t seed, int64_t position) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15u;
  const uint64_t state = mix(mix(static_cast<uint64_t>(seed) + golden) + static_cast<uint64_t>(position) * golden);
  return static_cast<double>(state >> 11) * 0x1p-53;
}

// Calls visit(id) for every id whose block could hold a logit of at least `lowest`, in order.
template <typename Visit>
void visit_blocks(const RowScratch& scratch, int64_t vocabulary, float lowest, Visit visit) {
  for (size_t block = 0; block < scratch.block_maxima.size(); ++block) {
    if (scratch.block_maxima[block] < lowest) continue;
    const int64_t start = static_cast<int64_t>(block) * kSampleBlock;
    const int64_t end = std::min<int64_t>(start + kSampleBlock, vocabulary);
    for (int64_t id = start; id < end; ++id) visit(id);
  }
}

int64_t first_of_largest(const float* logits, int64_t vocabulary, const RowScratch& scratch, float top) {
  int64_t found = kUnusable;
  visit_blocks(scratch, vocabulary, top, [&](int64_t id) {
    if (found == kUnusable && logits[id] == top) found = id;
  });
  return found;
}

void drop_after(const Candidate& worst, std::vector<Candidate>& candidates) {
  const auto dropped = std::remove_if(candidates.begin(), candidates.end(),
                                      [&](const Candidate& c) { return ranks_before(worst, c); });
  candidates.erase(dropped, candidates.end());
}

// Keeps exactly the first k candidates of the ranking, in order of id. The k-th largest maximum of a block is a lower
// bound of the k-th largest logit, and few logits reach this bound.
void keep_top_k(const float* logits, int64_t vocabulary, int64_t k, RowScratch& scratch) {
  float lowest = -std::numeric_limits<float>::infinity();
  if (k <= static_cast<int64_t>(scratch.block_maxima.size())) {
    scratch.selection = scratch.block_maxima;
    const auto kth = scratch.selection.begin() + (k - 1);
    std::nth_element(scratch.selection.begin(), kth, scratch.selection.end(), std::greater<float>());
    lowest = *kth;
  }
  scratch.candidates.clear();
  visit_blocks(scratch, vocabulary, lowest, [&](int64_t id) {
    if (logits[id] >= lowest) scratch.candidates.push_back({logits[id], static_cast<int32_t>(id), 0.0f});
  });
  if (static_cast<int64_t>(scratch.candidates.size()) <= k) return;
  scratch.ranking = scratch.candidates;
  const auto last = scratch.ranking.begin() + (k - 1);
  std::nth_element(scratch.ranking.begin(), last, scratch.ranking.end(), ranks_before);
  drop_after(*last, scratch.candidates);
}

// Tokens that each have less than (1 - top_p) / V of the total weight have together less weight than top_p leaves out,
// so none of them is kept.
void keep_heavy(const float* logits, int64_t vocabulary, const Settings& settings, float top, double total,
                RowScratch& scratch) {
  const double share = 0.999 * (1.0 - settings.top_p) * total / static_cast<double>(vocabulary);
  const float lowest = static_cast<float>(share);
  const double lowest_logit = top + settings.temperature * (std::log(share) - 0.001);
  scratch.candidates.clear();
  visit_blocks(scratch, vocabulary, static_cast<float>(lowest_logit), [&](int64_t id) {
    const float weight = scratch.weights[id];
    if (weight >= lowest) scratch.candidates.push_back({logits[id], static_cast<int32_t>(id), weight});
  });
}

double sum_weights(const std::vector<Candidate>& candidates) {
  double sum = 0;
  for (const Candidate& c : candidates) sum += c.weight;
  return sum;
}

// The shortest prefix of the ranking that weighs `mass`. Candidates are counted into bins of equal logit range, and
// only the bin in which the mass is reached is sorted.
void keep_top_p(double mass, RowScratch& scratch) {
  constexpr size_t num_bins = 1024;
  const auto by_logit = [](const Candidate& a, const Candidate& b) { return a.logit < b.logit; };
  const auto range = std::minmax_element(scratch.candidates.begin(), scratch.candidates.end(), by_logit);
  const float top = range.second->logit, span = top - range.first->logit;
  const float bins_per_logit = span > 0 && std::isfinite(span) ? (num_bins - 1) / span : 0.0f;
  const auto bin_of = [&](const Candidate& c) {
    const float bin = (top - c.logit) * bins_per_logit;  // NaN where an infinite distance meets a zero
    return bin < num_bins - 1 ? static_cast<size_t>(bin) : num_bins - 1;
  };
  double bins[num_bins] = {};
  for (const Candidate& c : scratch.candidates) bins[bin_of(c)] += c.weight;
  size_t bin = 0;
  double before = 0;
  while (bin + 1 < num_bins && before + bins[bin] < mass) before += bins[bin++];

  scratch.ranking.clear();
  for (const Candidate& c : scratch.candidates) {
    if (bin_of(c) == bin) scratch.ranking.push_back(c);
  }
  std::sort(scratch.ranking.begin(), scratch.ranking.end(), ranks_before);
  for (const Candidate& c : scratch.ranking) {
    before += c.weight;
    if (before >= mass) return drop_after(c, scratch.candidates);
  }
}

int64_t draw_candidate(const RowScratch& scratch, const Settings& settings) {
  double total = 0;
  for (const Candidate& c : scratch.candidates) total += c.weight >= settings.min_p ? c.weight : 0.0f;
  const double target = settings.uniform * total;
  double cumulative = 0;
  int64_t chosen = kUnusable;
  for (const Candidate& c : scratch.candidates) {
    if (c.weight < settings.min_p || c.weight == 0.0f) continue;
    chosen = c.id;
    cumulative += c.weight;
    if (cumulative > target) break;
  }
  return chosen;
}

// From the whole vocabulary: first the block, then the token in it.
int64_t draw_anything(int64_t vocabulary, const RowScratch& scratch, double target) {
  size_t block = 0;
  double before = 0, after = 0;
  for (size_t b = 0; b < scratch.block_sums.size() && after <= target; ++b) {
    if (scratch.block_sums[b] == 0.0f) continue;
    block = b;
    before = after;
    after += scratch.block_sums[b];
  }
  const int64_t start = static_cast<int64_t>(block) * kSampleBlock;
  int64_t chosen = kUnusable;
  for (int64_t id = start; id < std::min<int64_t>(start + kSampleBlock, vocabulary); ++id) {
    if (scratch.weights[id] == 0.0f) continue;
    chosen = id;
    before += scratch.weights[id];
    if (before > target) break;
  }
  return chosen;
}

int64_t sample_row(const float* logits, int64_t vocabulary, const Settings& settings) {
  static thread_local RowScratch scratch;
  scratch.block_maxima.resize(static_cast<size_t>(ceil_div(vocabulary, kSampleBlock)));
  if (!kernels().scan_logits(logits, vocabulary, scratch.block_maxima.data())) return kUnusable;
  const float top = *std::max_element(scratch.block_maxima.begin(), scratch.block_maxima.end());
  if (!std::isfinite(top)) return kUnusable;
  if (!(settings.temperature > 0)) return first_of_largest(logits, vocabulary, scratch, top);

  const float inverse_temperature = 1.0f / settings.temperature;
  const bool nucleus = settings.top_p < 1;
  if (settings.top_k > 0 && settings.top_k < vocabulary) {
    keep_top_k(logits, vocabulary, settings.top_k, scratch);
    for (Candidate& c : scratch.candidates) c.weight = std::exp((c.logit - top) * inverse_temperature);
    if (nucleus) keep_top_p(settings.top_p * sum_weights(scratch.candidates), scratch);
    return draw_candidate(scratch, settings);
  }
  scratch.weights.resize(static_cast<size_t>(vocabulary));
  scratch.block_sums.resize(scratch.block_maxima.size());
  kernels().weigh_logits(logits, vocabulary, top, inverse_temperature, nucleus ? 0.0f : settings.min_p,
                         scratch.weights.data(), scratch.block_sums.data());
  const double total = std::accumulate(scratch.block_sums.begin(), scratch.block_sums.end(), 0.0);
  if (!nucleus) return draw_anything(vocabulary, scratch, settings.uniform * total);
  keep_heavy(logits, vocabulary, settings, top, total, scratch);
  keep_top_p(settings.top_p * total, scratch);
  return draw_candidate(scratch, settings);
}

}  // namespace
}  // namespace penstock

// Mirrored field by field in native.py.
struct PenstockSampling {
  int64_t num_rows;
  int64_t vocabulary;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* position;
};

PENSTOCK_API double penstock_uniform_draw(int64_t seed, int64_t position) {
  return penstock::uniform_draw(seed, position);
}

PENSTOCK_API void penstock_sample(const PenstockSampling* batch, const float* logits, int64_t* tokens) {
  penstock::parallel_for(batch->num_rows, [&](int64_t row) {
    const penstock::Settings settings = {batch->temperature[row], batch->top_k[row], batch->top_p[row],
                                         batch->min_p[row],
                                         penstock::uniform_draw(batch->seed[row], batch->position[row])};
    tokens[row] = penstock::sample_row(logits + row * batch->vocabulary, batch->vocabulary, settings);
  });
}
