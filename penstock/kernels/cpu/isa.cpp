// Which instruction sets this processor has, and which one is in use.
#include <atomic>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace penstock {
namespace {

#if defined(__x86_64__) && defined(__linux__)
// The kernel gives a process room for tile registers only when asked.
bool request_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool request_tiles() { return false; }
#endif

#if defined(__x86_64__)
Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::generic;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return Isa::avx2;
  }
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return Isa::avx512;
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25;
  constexpr unsigned needed = amx_bf16 | amx_tile | amx_int8;
  const bool tiles = (d & needed) == needed;
  return tiles && amx_kernels() != nullptr && request_tiles() ? Isa::amx : Isa::avx512_bf16;
}
#else
Isa detect() { return Isa::generic; }
#endif

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

const Kernels* table_of(Isa isa) {
  switch (isa) {
    case Isa::generic: return generic_kernels();
    case Isa::avx2: return avx2_kernels();
    case Isa::avx512: return avx512_kernels();
    case Isa::avx512_bf16: return avx512_bf16_kernels();
    case Isa::amx: return amx_kernels();
  }
  return nullptr;
}

struct Choice {
  std::atomic<Isa> isa{best_isa()};
  std::atomic<const Kernels*> table{table_of(best_isa())};
};

Choice& choice() {
  static Choice made;
  return made;
}

}  // namespace

const Kernels& kernels() { return *choice().table.load(std::memory_order_relaxed); }

Isa current_isa() { return choice().isa.load(); }

}  // namespace penstock

using namespace penstock;

PENSTOCK_API int penstock_best_isa() { return static_cast<int>(best_isa()); }

PENSTOCK_API int penstock_isa() { return static_cast<int>(current_isa()); }

// Whether products in whole numbers are faster than those of the same weights unpacked to floating point.
PENSTOCK_API int penstock_fast_integers() { return kernels().fast_integers; }

// For tests: use a lesser set than the best. False when this machine has no such set. Not while work is under way.
PENSTOCK_API int penstock_set_isa(int isa) {
  if (isa < 0 || isa > static_cast<int>(best_isa())) return 0;
  choice().isa = static_cast<Isa>(isa);
  choice().table = table_of(static_cast<Isa>(isa));
  return 1;
}
