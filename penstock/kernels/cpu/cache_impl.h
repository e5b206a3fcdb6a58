// Head norms, rope and the write of one token's keys and values, compiled once per instruction set.
#pragma once

#include "attention.h"
#include "elementwise_impl.h"
#include "vec.h"

namespace penstock {
namespace PENSTOCK_ISA {

// One head of `from`, in float32, with norm and rope applied where given.
template <typename Element>
static void prepare_head(const AttentionLayer& layer, const Element* from, const float* norm, const float* rope,
                         float* to) {
  const int64_t dim = layer.head_dim, half = dim / 2;
  alignas(64) float head[kMaxHeadDim + kLanes];
  for (int64_t d = 0; d < dim; d += kLanes) store(head + d, load_some(from + d, dim - d));
  if (norm != nullptr) {
    const Floats scale = broadcast(inverse_rms(head, dim, layer.norm_eps));
    for (int64_t d = 0; d < dim; d += kLanes) store(head + d, load(head + d) * scale * load_some(norm + d, dim - d));
  }
  for (int64_t d = 0; d < half; ++d) {
    const float first = head[d], second = head[d + half], cosine = rope[d], sine = rope[d + half];
    to[d] = first * cosine - second * sine;
    to[d + half] = second * cosine + first * sine;
  }
}

// To the cache's precision, which queries share.
template <typename Element>
static void round_head(const float* head, int64_t dim, Element* to) {
  for (int64_t d = 0; d < dim; d += kLanes) store(to + d, load(head + d));
}

// The key and the value of token `offset` of a unit to their places, padded with zeros.
PENSTOCK_INLINE void place_key(const float* key, int64_t key_dim, int64_t offset, float* keys) {
  for (int64_t d = 0; d < key_dim; ++d) keys[d * kUnitTokens + offset] = key[d];
}

PENSTOCK_INLINE void place_value(const float* value, int64_t dim, int64_t value_dim, int64_t offset, float* values) {
  for (int64_t d = 0; d < value_dim; ++d) values[offset * value_dim + d] = d < dim ? value[d] : 0.0f;
}

PENSTOCK_INLINE void place_key(const bf16* key, int64_t key_dim, int64_t offset, bf16* keys) {
  for (int64_t pair = 0; pair < key_dim / 2; ++pair) {
    memcpy(keys + (pair * kUnitTokens + offset) * 2, key + pair * 2, 2 * sizeof(bf16));
  }
}

// Every second element: those between are another token's, which another thread may be writing.
PENSTOCK_INLINE void place_value(const bf16* value, int64_t dim, int64_t value_dim, int64_t offset, bf16* values) {
  bf16* to = values + offset / 2 * value_dim * 2 + offset % 2;
  int64_t d = 0;
#if PENSTOCK_REGISTER_BYTES == 64
  for (; d + kLanes <= dim; d += kLanes) {
    const __m512i words = (__m512i)load_words(value + d).part[0];
    _mm512_mask_storeu_epi16(to + d * 2, 0x55555555, words);
  }
#endif
  for (; d < dim; ++d) to[d * 2] = value[d];
  for (; d < value_dim; ++d) to[d * 2] = 0;
}

// Rounds `count` numbers to codes, padded with zeros to a multiple of the lanes, and returns the scale. A number that
// is not finite makes the scale NaN, and every result that is computed with the scale.
template <typename Element>
static float round_to_codes(const Element* numbers, int64_t count, int8_t* codes) {
  constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr float largest_code = 127.0f, least = 1e-12f;
  Floats highest = broadcast(least), spoiled = zeros();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = load_some(numbers + i, count - i);
    highest = maximum(maximum(x, zeros() - x), highest);
    spoiled = spoiled + x * zeros();
  }
  const float scale = reduce_max(highest) / largest_code;
  const Floats inverse = broadcast(1.0f / scale);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats shifted = multiply_add(load_some(numbers + i, count - i), inverse, broadcast(rounder));
    store_bytes(reinterpret_cast<uint8_t*>(codes) + i, as_ints(shifted));
  }
  return scale + reduce_sum(spoiled);
}

template <typename Element>
static void place_rounded(const AttendCall& call, int64_t slot, int64_t kv_head, const Element* key,
                          const Element* value) {
  const int64_t unit = slot / kUnitTokens, offset = slot % kUnitTokens;
  const int64_t key_dim = call.layout.key_dim, value_dim = call.layout.value_dim;
  alignas(64) int8_t codes[kMaxHeadDim + kLanes];
  float* scales = call.scales(unit, kv_head);
  scales[offset] = round_to_codes(key, key_dim, codes);
  int8_t* keys = reinterpret_cast<int8_t*>(call.keys(unit, kv_head));
  for (int64_t d = 0; d < key_dim; ++d) keys[d * kUnitTokens + offset] = codes[d];
  scales[kUnitTokens + offset] = round_to_codes(value, call.layer->head_dim, codes);
  memcpy(call.values(unit, kv_head) + offset * value_dim, codes, static_cast<size_t>(value_dim));
}

template <typename Element, typename Query>
static void store_token_as(const AttendCall& call, int64_t token) {
  const AttentionLayer& layer = *call.layer;
  const int64_t dim = layer.head_dim, key_dim = call.layout.key_dim, value_dim = call.layout.value_dim;
  const int64_t heads = call.heads_per_kv_head();
  const float* rope = layer.rope + static_cast<int64_t>(call.batch->positions[token]) * dim;
  const Element* row =
      static_cast<const Element*>(call.qkv) + token * (layer.num_heads + 2 * layer.num_kv_heads) * dim;
  const int64_t slot = call.batch->slots[token];
  const int64_t unit = slot / kUnitTokens, offset = slot % kUnitTokens;

  alignas(64) float head[kMaxHeadDim + kLanes] = {};
  alignas(64) Element rounded[kMaxHeadDim + kLanes];
  for (int64_t index = 0; index < layer.num_heads; ++index) {
    prepare_head(layer, row + index * dim, layer.q_norm, rope, head);
    const int64_t to_row = (index / heads * call.batch->num_tokens + token) * heads + index % heads;
    Query* to = static_cast<Query*>(call.queries) + to_row * key_dim;
    round_head(head, key_dim, rounded);
    for (int64_t d = 0; d < key_dim; d += kLanes) store(to + d, load(rounded + d));
  }
  for (int64_t index = 0; index < layer.num_kv_heads; ++index) {
    prepare_head(layer, row + (layer.num_heads + index) * dim, layer.k_norm, rope, head);
    round_head(head, key_dim, rounded);
    const Element* value = row + (layer.num_heads + layer.num_kv_heads + index) * dim;
    if (call.layout.rounded) {
      place_rounded(call, slot, index, rounded, value);
      continue;
    }
    Element* keys = reinterpret_cast<Element*>(call.keys(unit, index));
    Element* values = reinterpret_cast<Element*>(call.values(unit, index));
    place_key(rounded, key_dim, offset, keys);
    place_value(value, dim, value_dim, offset, values);
  }
}

// For VectorEngine, whose queries are float32.
[[maybe_unused]] static void store_token(const AttendCall& call, int64_t token) {
  if (call.dtype == Dtype::float32) return store_token_as<float, float>(call, token);
  return store_token_as<bf16, float>(call, token);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
