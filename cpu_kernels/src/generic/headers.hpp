// What the generic code needs, included before any target region begins.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../kernels.hpp"
#include "../tables.hpp"
#include "../target.hpp"
