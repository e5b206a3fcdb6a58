// AMX tiles for matrix work in bfloat16; everything else is AVX-512 with bfloat16.
#include "kernels.h"
#include "target.h"

#if PENSTOCK_HAS_AMX

namespace penstock {

namespace amx {
void forget_tiles();
void pack_activations(const LinearCall& call, const bf16* x, int64_t first_row, int64_t num_rows, bf16* to);
void multiply_strip(const LinearCall& call, const Strip& strip, int64_t first_row, int64_t end_row);
void multiply_gated(const LinearCall& call, const Strip& gate, const Strip& up, Activation activation,
                    int64_t first_row, int64_t end_row);
void attend_tiles_bf16(const AttendCall& call, const QueryTile* tiles, int64_t num_tiles);
void store_token_bf16(const AttendCall& call, int64_t token);

static void attend_tiles(const AttendCall& call, const QueryTile* tiles, int64_t num_tiles) {
  if (call.dtype == Dtype::bfloat16) return attend_tiles_bf16(call, tiles, num_tiles);
  return avx512_bf16_kernels()->attend_tiles(call, tiles, num_tiles);
}

static void store_token(const AttendCall& call, int64_t token) {
  if (call.dtype == Dtype::bfloat16) return store_token_bf16(call, token);
  return avx512_bf16_kernels()->store_token(call, token);
}
}  // namespace amx

const Kernels* amx_kernels() {
  static const Kernels table = [] {
    Kernels made = *avx512_bf16_kernels();
    made.enter = amx::forget_tiles;
    made.activations = Activations::tiles;
    made.pack_activations = amx::pack_activations;
    made.multiply_strip_bf16 = amx::multiply_strip;
    made.multiply_gated = amx::multiply_gated;
    // Tiles multiply bfloat16 faster.
    made.fast_integers = false;
    made.attend_tiles = amx::attend_tiles;
    made.store_token = amx::store_token;
    return made;
  }();
  return &table;
}

}  // namespace penstock

#else

const penstock::Kernels* penstock::amx_kernels() { return nullptr; }

#endif
