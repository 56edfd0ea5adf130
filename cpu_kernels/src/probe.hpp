// How fast this machine reads memory: plain streaming loops to hold a kernel's speed against.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker_pool.hpp"

namespace cpu_kernels {

// One way to read. Which is fastest depends on the machine: wider vectors need fewer instructions, several streams keep
// more of the hardware's prefetchers busy.
struct ReadVariant {
  const char* name;
  const char* feature;  // what the CPU must have (a name of cpu_features.cpp), or "" for nothing
  // Reads [data, data + bytes), bytes a multiple of 1024, and does nothing with it.
  void (*read)(const std::uint8_t* data, std::size_t bytes);
};

constexpr int kMaxReadVariants = 8;
// Stores what this build has in `out` and returns how many.
int read_variants(ReadVariant* out);

// Reads [data, data + bytes) in chunks, as a job for threads. Bytes after the last whole chunk are left out.
class ReadJob {
 public:
  ReadJob(const ReadVariant& variant, const std::uint8_t* data, std::size_t bytes, std::size_t chunk);
  ReadJob(const ReadJob&) = delete;
  ReadJob& operator=(const ReadJob&) = delete;

  const Job& job() const { return job_; }
  std::size_t bytes() const { return static_cast<std::size_t>(job_.items) * chunk_; }

 private:
  ReadVariant variant_;
  const std::uint8_t* data_;
  std::size_t chunk_;
  Job job_;
};

// Runs a job on the calling thread and `threads` - 1 more that live for this call.
void run_on_threads(const Job& job, int threads);

// Fills [data, data + bytes) with copies of [pattern, pattern + pattern_bytes), every thread a stretch of its own so
// that the memory it touches first is near it.
void fill(std::uint8_t* data, std::size_t bytes, const std::uint8_t* pattern, std::size_t pattern_bytes, int threads);

}  // namespace cpu_kernels
