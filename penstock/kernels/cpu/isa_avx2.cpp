#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx2,fma,f16c")

#define PENSTOCK_ISA avx2
#define PENSTOCK_REGISTER_BYTES 32
#include "table_impl.h"

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::avx2_kernels() {
  static const Kernels table = avx2::make_table();
  return &table;
}

#else

const penstock::Kernels* penstock::avx2_kernels() { return nullptr; }

#endif
