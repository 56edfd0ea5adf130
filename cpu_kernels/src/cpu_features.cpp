#include "cpu_features.hpp"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace cpu_kernels {
namespace {

// Best first: the first whose features are all present is chosen.
constexpr Isa kIsas[] = {
    {"amx", "Intel AMX tiles, bf16 and int8",
     "avx512f,avx512bw,avx512dq,avx512vl,avx512_vnni,avx512_bf16,amx_tile,amx_bf16,amx_int8"},
    {"avx512_bf16", "AVX-512 with bf16 dot products", "avx512f,avx512bw,avx512dq,avx512vl,avx512_vnni,avx512_bf16"},
    {"avx512", "AVX-512 with VNNI", "avx512f,avx512bw,avx512dq,avx512vl,avx512_vnni"},
    {"avx2", "AVX2 with FMA and F16C", "avx2,fma,f16c"},
    {"neon", "Arm NEON", "neon"},
    {"scalar", "portable C++", ""},
};

#if defined(__x86_64__)

struct Registers {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  Registers r;
  // Returns 0 and leaves the registers at zero for a leaf the CPU does not have: all features absent.
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// XCR0: which register states the operating system saves. Only valid if OSXSAVE is set.
std::uint64_t xcr0() {
  std::uint32_t lo = 0, hi = 0;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<std::uint64_t>(hi) << 32) | lo;
}

// Linux hands out the tile registers only to processes that ask (arch_prctl, since 5.16).
bool request_amx_permission() {
#if defined(__linux__)
  constexpr long kReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

constexpr bool bit(std::uint64_t word, int index) { return (word >> index) & 1; }

#endif  // x86-64

}  // namespace

std::size_t detect_features(Feature* out, std::size_t capacity) {
  std::size_t count = 0;
  auto add = [&](const char* name, bool present) {
    if (count < capacity) out[count] = {name, present};
    ++count;
  };
#if defined(__x86_64__)
  const Registers l1 = cpuid(1, 0), l7 = cpuid(7, 0), l71 = cpuid(7, 1);
  const std::uint64_t saved = bit(l1.ecx, 27) ? xcr0() : 0;
  const bool ymm = (saved & 0x6) == 0x6;
  const bool zmm = ymm && (saved & 0xe0) == 0xe0;
  const bool tiles = (saved & 0x60000) == 0x60000 && bit(l7.edx, 24) && request_amx_permission();
  add("avx2", ymm && bit(l7.ebx, 5));
  add("fma", ymm && bit(l1.ecx, 12));
  add("f16c", ymm && bit(l1.ecx, 29));
  add("avx512f", zmm && bit(l7.ebx, 16));
  add("avx512dq", zmm && bit(l7.ebx, 17));
  add("avx512bw", zmm && bit(l7.ebx, 30));
  add("avx512vl", zmm && bit(l7.ebx, 31));
  add("avx512_vnni", zmm && bit(l7.ecx, 11));
  add("avx512_bf16", zmm && bit(l71.eax, 5));
  add("avx512_fp16", zmm && bit(l7.edx, 23));
  add("amx_tile", tiles);
  add("amx_bf16", tiles && bit(l7.edx, 22));
  add("amx_int8", tiles && bit(l7.edx, 25));
#elif defined(__aarch64__)
  add("neon", true);  // part of the base architecture
#if defined(__linux__)
  const unsigned long hwcap = getauxval(AT_HWCAP), hwcap2 = getauxval(AT_HWCAP2);
  add("fphp", (hwcap >> 9) & 1);
  add("asimddp", (hwcap >> 20) & 1);
  add("sve", (hwcap >> 22) & 1);
  add("i8mm", (hwcap2 >> 13) & 1);
  add("bf16", (hwcap2 >> 14) & 1);
#endif
#else
  (void)add;
#endif
  return count;
}

const Isa* isa_table(std::size_t* count) {
  *count = sizeof(kIsas) / sizeof(kIsas[0]);
  return kIsas;
}

}  // namespace cpu_kernels
