// ARMv8.2 with dot products of bytes. Vectors of floats are the same as in the baseline.
#include "kernels.h"

#if defined(__aarch64__)

#include "target.h"
PENSTOCK_TARGET_BEGIN("arch=armv8.2-a+dotprod")

#include <arm_neon.h>

#define PENSTOCK_ISA neon_dot
#define PENSTOCK_REGISTER_BYTES 16
#include "integer_neon.h"

PENSTOCK_TARGET_END

const penstock::Kernels* penstock::neon_dot_kernels() {
  static const Kernels table = [] {
    Kernels made = *generic_kernels();
    neon_dot::use_engine<neon_dot::NeonEngine>(&made);
    return made;
  }();
  return &table;
}

#else

const penstock::Kernels* penstock::neon_dot_kernels() { return nullptr; }

#endif
