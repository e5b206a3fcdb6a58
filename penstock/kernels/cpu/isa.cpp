// Which instruction sets this processor has, and which one is in use.
#include <atomic>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
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
#elif defined(__x86_64__)
bool request_tiles() { return false; }
#endif

#if defined(__x86_64__)
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

bool has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, 0, &a, &b, &c, &d);
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25;
  constexpr unsigned needed = amx_bf16 | amx_tile | amx_int8;
  return (d & needed) == needed && amx_kernels() != nullptr && request_tiles();
}

// Says whether this processor has an instruction set, provided that it has all smaller sets. (A processor with AVX-512
// need not have AVX-VNNI.)
bool has(Isa isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  switch (isa) {
    case Isa::generic: return true;
    case Isa::neon_dot: return false;
    case Isa::avx2: return avx2;
    case Isa::avx2_vnni: return avx2 && has_avx_vnni() && avx2_vnni_kernels() != nullptr;
    case Isa::avx512: return avx512;
    case Isa::avx512_vnni: return vnni;
    case Isa::avx512_bf16: return bf16;
    case Isa::amx: return bf16 && has_tiles();
  }
  return false;
}
#elif defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long dot_products = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & dot_products;
#else
  return true;  // every processor that Apple sells with this architecture
#endif
}

bool has(Isa isa) { return isa == Isa::generic || (isa == Isa::neon_dot && has_dot_products()); }
#else
bool has(Isa isa) { return isa == Isa::generic; }
#endif

Isa detect() {
  int32_t best = kNumIsas - 1;
  while (!has(static_cast<Isa>(best))) --best;
  return static_cast<Isa>(best);
}

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

const Kernels* table_of(Isa isa) {
  switch (isa) {
    case Isa::generic: return generic_kernels();
    case Isa::neon_dot: return neon_dot_kernels();
    case Isa::avx2: return avx2_kernels();
    case Isa::avx2_vnni: return avx2_vnni_kernels();
    case Isa::avx512: return avx512_kernels();
    case Isa::avx512_vnni: return avx512_vnni_kernels();
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

#ifndef PENSTOCK_INTERFACE_STAMP
#define PENSTOCK_INTERFACE_STAMP 0
#endif

// What setup.py computed from library.py: a library that was built for another interface is not used.
PENSTOCK_API uint64_t penstock_interface_stamp() { return PENSTOCK_INTERFACE_STAMP; }

PENSTOCK_API int penstock_best_isa() { return static_cast<int>(best_isa()); }

PENSTOCK_API int penstock_isa() { return static_cast<int>(current_isa()); }

// Whether products in whole numbers are faster than products of the same weights unpacked to floating point.
PENSTOCK_API int penstock_fast_integers() { return kernels().fast_integers; }

// Selects an instruction set. Returns 0 when this machine does not have the set. Do not call this function while
// kernels run.
PENSTOCK_API int penstock_set_isa(int isa) {
  if (isa < 0 || isa >= kNumIsas || !has(static_cast<Isa>(isa))) return 0;
  choice().isa = static_cast<Isa>(isa);
  choice().table = table_of(static_cast<Isa>(isa));
  return 1;
}
