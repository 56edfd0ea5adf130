// Included inside each instruction set's namespace and target region.

// f(0) ... f(N - 1) with constants as arguments. Unrolled here and not by the compiler, which does it too late to keep
// arrays of accumulators in registers.
template <int N, int kFrom = 0, class Function>
CPU_KERNELS_INLINE void unroll(const Function& f) {
  if constexpr (kFrom < N) {
    f(std::integral_constant<int, kFrom>());
    unroll<N, kFrom + 1>(f);
  }
}
