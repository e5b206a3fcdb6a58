// Compiles the code between BEGIN and END for more than the baseline. The code may run only after a check that the
// processor has those features.
#pragma once

#define PENSTOCK_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define PENSTOCK_TARGET_BEGIN(features) \
  PENSTOCK_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define PENSTOCK_TARGET_END PENSTOCK_PRAGMA(clang attribute pop)
#else
#define PENSTOCK_TARGET_BEGIN(features) \
  PENSTOCK_PRAGMA(GCC push_options)     \
  PENSTOCK_PRAGMA(GCC target(features))
#define PENSTOCK_TARGET_END PENSTOCK_PRAGMA(GCC pop_options)
#endif

// Tiles need the operating system's permission (Linux) and a compiler that supports them.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define PENSTOCK_HAS_AMX 1
#else
#define PENSTOCK_HAS_AMX 0
#endif
