// AVX2.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx2,fma,f16c")

#define PENSTOCK_ISA avx2
#define PENSTOCK_REGISTER_BYTES 32
#include "integer_x86.h"
#include "table_impl.h"

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::avx2_kernels() {
  static const Kernels table = [] {
    Kernels made = avx2::make_table();
    avx2::use_engine<avx2::ByteEngine>(&made);
    return made;
  }();
  return &table;
}

#else

const penstock::Kernels* penstock::avx2_kernels() { return nullptr; }

#endif
