// What the CPU under this process can run, asked of the CPU and of the operating system.
#pragma once

#include <cstddef>

namespace cpu_kernels {

// One row per feature: its name as users see it, and whether instructions of it may be executed here.
// A feature counts as present only if the operating system also saves the registers it needs.
struct Feature {
  const char* name;
  bool present;
};

// One row per instruction set that the kernels are written for, best first.
// `required` lists feature names, comma separated; an empty list always matches.
struct Isa {
  const char* name;
  const char* description;
  const char* required;
};

// Writes at most `capacity` rows to `out`; returns how many rows there are.
std::size_t detect_features(Feature* out, std::size_t capacity);

// The static table of instruction sets, best first.
const Isa* isa_table(std::size_t* count);

}  // namespace cpu_kernels
