// Kernels for the baseline of the compiler: SSE2 on x86-64, NEON on aarch64.
#include "kernels.h"

#define PENSTOCK_ISA generic
#define PENSTOCK_REGISTER_BYTES 16
#include "table_impl.h"

const penstock::Kernels* penstock::generic_kernels() {
  static const Kernels table = [] {
    Kernels made = generic::make_table();
    generic::use_engine<generic::PlainEngine>(&made, false);
    return made;
  }();
  return &table;
}
