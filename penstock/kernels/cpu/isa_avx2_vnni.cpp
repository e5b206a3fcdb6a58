// AVX2 with dot products of bytes. All but products in whole numbers is the same as with AVX2.
#include "kernels.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)

#include <immintrin.h>

#include "target.h"
PENSTOCK_TARGET_BEGIN("avx2,fma,f16c,avxvnni")

#define PENSTOCK_ISA avx2_vnni
#define PENSTOCK_REGISTER_BYTES 32
#define PENSTOCK_DOT_PRODUCTS
#include "integer_x86.h"

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::avx2_vnni_kernels() {
  static const Kernels table = [] {
    Kernels made = *avx2_kernels();
    avx2_vnni::use_engine<avx2_vnni::ByteEngine>(&made);
    return made;
  }();
  return &table;
}

#else

const penstock::Kernels* penstock::avx2_vnni_kernels() { return nullptr; }

#endif
