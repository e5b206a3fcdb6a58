// AVX-512.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")

#define PENSTOCK_ISA avx512
#define PENSTOCK_REGISTER_BYTES 64
#include "integer_x86.h"
#include "table_impl.h"

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::avx512_kernels() {
  static const Kernels table = [] {
    Kernels made = avx512::make_table();
    avx512::use_engine<avx512::ByteEngine>(&made);
    return made;
  }();
  return &table;
}

#else

const penstock::Kernels* penstock::avx512_kernels() { return nullptr; }

#endif
