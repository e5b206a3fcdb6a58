// Gathers everything compiled for one instruction set into its table, except the products in whole numbers: their
// engine is chosen by `use_engine`. Sets that add instructions for whole numbers take the rest of a smaller set's table.
#pragma once

#include "attention_vector.h"
#include "cache_impl.h"
#include "elementwise_impl.h"
#include "integer_impl.h"
#include "linear_impl.h"
#include "sample_impl.h"

namespace penstock {
namespace PENSTOCK_ISA {

static Kernels make_table() {
  Kernels table = {};
  table.enter = [] {};
  table.rms_norm = rms_norm;
  table.add_rms_norm = add_rms_norm;
  table.gated = gated;
  table.widen = widen;
  table.multiply_strip_f32 = multiply_strip;
  table.multiply_strip_bf16 = multiply_strip;
  table.activations = Activations::widened;
  table.round_row = round_row;
  table.read_row = read_row;
  table.store_token = store_token;
  table.attend_tiles = attend_tiles;
  table.merge_tile = merge_tile;
  table.find_maximum = find_maximum;
  table.scan_logits = scan_logits;
  table.weigh_logits = weigh_logits;
  return table;
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
