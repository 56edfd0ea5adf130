// The little that the C++ tests need: checks that stay on in every build, and a list of named tests.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#define CPU_KERNELS_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CPU_KERNELS_TSAN 1
#endif
#endif
#ifndef CPU_KERNELS_TSAN
#define CPU_KERNELS_TSAN 0
#endif

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

// `statement` throws `Type` with `text` somewhere in its message.
#define CHECK_THROWS(Type, text, statement)                                                              \
  do {                                                                                                   \
    bool thrown = false;                                                                                 \
    try {                                                                                                \
      statement;                                                                                         \
    } catch (const Type& error) {                                                                        \
      thrown = std::strstr(error.what(), text) != nullptr;                                               \
      if (!thrown) std::fprintf(stderr, "message: %s\n", error.what());                                  \
    }                                                                                                    \
    if (!thrown) {                                                                                       \
      std::fprintf(stderr, "%s:%d: no " #Type " with '%s': %s\n", __FILE__, __LINE__, text, #statement); \
      std::abort();                                                                                      \
    }                                                                                                    \
  } while (false)

struct Test {
  const char* name;
  void (*run)();
};

// Runs the tests whose names contain argv[1], or all.
inline int run_tests(int argc, char** argv, const std::vector<Test>& tests) {
  int ran = 0;
  for (const Test& test : tests) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    std::printf("  %s", test.name);
    std::fflush(stdout);
    auto begin = std::chrono::steady_clock::now();
    test.run();
    std::printf(" %.2f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    ++ran;
  }
  std::printf("%d tests passed\n", ran);
  return ran == 0;
}
