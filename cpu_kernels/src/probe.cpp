#include "probe.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "target.hpp"

namespace cpu_kernels {
namespace {

typedef std::uint64_t Vector16 __attribute__((vector_size(16), may_alias, aligned(8)));
typedef std::uint64_t Vector32 __attribute__((vector_size(32), may_alias, aligned(8)));
typedef std::uint64_t Vector64 __attribute__((vector_size(64), may_alias, aligned(8)));

// The body is the same for all; the target region around it decides which instructions a vector becomes, and that is
// settled before a template would be inlined, so it is a macro. Each stream reads its own part of the data, in turn a
// block of 256 bytes. The empty asm takes the sums, or the compiler would leave the loads out.
#define CPU_KERNELS_READ_LOOP(name, Vector, kStreams)                                   \
  void name(const std::uint8_t* data, std::size_t bytes) {                              \
    constexpr std::size_t kBlock = 256, kBytes = sizeof(Vector);                        \
    const std::size_t part = bytes / kStreams;                                          \
    Vector sum[kBlock / kBytes] = {};                                                   \
    for (std::size_t i = 0; i < part; i += kBlock)                                      \
      for (int s = 0; s < kStreams; ++s)                                                \
        for (std::size_t j = 0; j < kBlock / kBytes; ++j)                               \
          sum[j] ^= *reinterpret_cast<const Vector*>(data + s * part + i + j * kBytes); \
    for (Vector& x : sum) asm volatile("" ::"m"(x));                                    \
  }

// clang-format off
CPU_KERNELS_READ_LOOP(read16, Vector16, 1)
CPU_KERNELS_READ_LOOP(read16x4, Vector16, 4)

#if defined(__x86_64__)
CPU_KERNELS_BEGIN_TARGET("avx2")
CPU_KERNELS_READ_LOOP(read32, Vector32, 1)
CPU_KERNELS_READ_LOOP(read32x4, Vector32, 4)
CPU_KERNELS_END_TARGET

CPU_KERNELS_BEGIN_TARGET("avx512f")
CPU_KERNELS_READ_LOOP(read64, Vector64, 1)
CPU_KERNELS_READ_LOOP(read64x4, Vector64, 4)
CPU_KERNELS_END_TARGET
#endif
// clang-format on

#undef CPU_KERNELS_READ_LOOP

}  // namespace

int read_variants(ReadVariant* out) {
  int count = 0;
#if defined(__x86_64__)
  out[count++] = {"64-byte loads, 4 streams", "avx512f", read64x4};
  out[count++] = {"64-byte loads", "avx512f", read64};
  out[count++] = {"32-byte loads, 4 streams", "avx2", read32x4};
  out[count++] = {"32-byte loads", "avx2", read32};
#endif
  out[count++] = {"16-byte loads, 4 streams", "", read16x4};
  out[count++] = {"16-byte loads", "", read16};
  return count;
}

ReadJob::ReadJob(const ReadVariant& variant, const std::uint8_t* data, std::size_t bytes, std::size_t chunk)
    : variant_(variant), data_(data), chunk_(chunk) {
  job_.items = static_cast<int>(bytes / chunk);
  job_.context = this;
  job_.run = [](void* context, int item, int, NextItem*) {
    const ReadJob& self = *static_cast<const ReadJob*>(context);
    self.variant_.read(self.data_ + static_cast<std::size_t>(item) * self.chunk_, self.chunk_);
  };
}

void run_on_threads(const Job& job, int threads) {
  std::atomic<int> next{0};
  auto work = [&](int worker) {
    NextItem none;
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < job.items;)
      job.run(job.context, item, worker, &none);
  };
  std::vector<std::thread> others;
  for (int worker = 1; worker < std::min(threads, job.items); ++worker) others.emplace_back(work, worker);
  work(0);
  for (std::thread& thread : others) thread.join();
}

void fill(std::uint8_t* data, std::size_t bytes, const std::uint8_t* pattern, std::size_t pattern_bytes, int threads) {
  // Whole patterns, and together at least everything.
  const std::size_t part = (bytes / threads / pattern_bytes + 1) * pattern_bytes;
  auto work = [=](std::size_t begin) {
    for (std::size_t at = begin; at < std::min(bytes, begin + part); at += pattern_bytes)
      std::memcpy(data + at, pattern, std::min(pattern_bytes, bytes - at));
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work, i * part);
  work(0);
  for (std::thread& thread : others) thread.join();
}

}  // namespace cpu_kernels
