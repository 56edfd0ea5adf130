// Brackets a region whose functions are compiled for an instruction set that the build as a whole does not assume.
// Standard headers must be included before the region, so that nothing they define inline leaks the instruction set.
#pragma once

#define CPU_KERNELS_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define CPU_KERNELS_BEGIN_TARGET(features) \
  CPU_KERNELS_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define CPU_KERNELS_END_TARGET CPU_KERNELS_PRAGMA(clang attribute pop)
#else
#define CPU_KERNELS_BEGIN_TARGET(features) \
  CPU_KERNELS_PRAGMA(GCC push_options)     \
  CPU_KERNELS_PRAGMA(GCC target(features))
#define CPU_KERNELS_END_TARGET CPU_KERNELS_PRAGMA(GCC pop_options)
#endif

// Before a region whose speed matters to nobody: compiles in two thirds of the time.
#if defined(__clang__)
#define CPU_KERNELS_BUILD_FAST
#else
#define CPU_KERNELS_BUILD_FAST CPU_KERNELS_PRAGMA(GCC optimize("O1"))
#endif

#define CPU_KERNELS_INLINE inline __attribute__((always_inline))

// Lambdas that hold vector registers must be inlined early, or the registers become memory.
#define CPU_KERNELS_LAMBDA __attribute__((always_inline))
