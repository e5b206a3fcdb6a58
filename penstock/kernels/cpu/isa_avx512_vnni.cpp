// AVX-512 with dot products of bytes. All but products in whole numbers is the same as with AVX-512.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")

#define PENSTOCK_ISA avx512_vnni
#define PENSTOCK_REGISTER_BYTES 64
#define PENSTOCK_DOT_PRODUCTS
#include "integer_x86.h"

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::avx512_vnni_kernels() {
  static const Kernels table = [] {
    Kernels made = *avx512_kernels();
    avx512_vnni::use_engine<avx512_vnni::ByteEngine>(&made);
    return made;
  }();
  return &table;
}

#else

const penstock::Kernels* penstock::avx512_vnni_kernels() { return nullptr; }

#endif
