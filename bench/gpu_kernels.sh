#!/usr/bin/env bash
# The CPU kernels on a machine that has no package registry: build, test and measure in one go.
#   [BUNDLE=folder] OUT=folder SGLANG_NEO_COMMIT=... bench/gpu_kernels.sh [test|bench|shared|all]
# shared: only what sharing a prefix gains, at several numbers of threads and with variants of the tuning; half a minute.
# BUNDLE, OUT: see bench/gpu_setup.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}
. bench/gpu_setup.sh
{ lscpu; python3 -m cpu_kernels.info; } > "$OUT/machine.txt" 2>&1
tail -40 "$OUT/machine.txt"

if [ "$what" != bench ] && [ "$what" != shared ]; then
  log "C++ tests"
  g++ -std=c++17 -O2 -pthread -Isrc src/tests/test_kernels.cpp $(ls src/*.cpp src/*/kernels.cpp | grep -v probe.cpp) -o test_kernels \
    > "$OUT/cpp_build.txt" 2>&1 & build=$!
  log "Python tests"
  CPU_KERNELS_CALIBRATION=off timeout 240 python3 -m pytest tests/kernels -q -x -p no:cacheprovider --noconftest > "$OUT/kernel_tests.txt" 2>&1 || status=1
  tail -15 "$OUT/kernel_tests.txt"
  if wait $build; then timeout 100 ./test_kernels > "$OUT/cpp_tests.txt" 2>&1 || status=1; tail -5 "$OUT/cpp_tests.txt"; else
    status=1; tail -5 "$OUT/cpp_build.txt"; fi
fi
if [ "$what" != test ]; then
  log "shared prefixes"
  CPU_KERNELS_CALIBRATION=off timeout 60 python3 -m bench.shared_prefix --threads 1 12 14 16 --seconds 4 \
    > "$OUT/shared_prefix.jsonl" 2>&1 || status=1
  cat "$OUT/shared_prefix.jsonl"
fi
if [ "$what" != test ] && [ "$what" != shared ]; then
  log "calibration"
  timeout 60 python3 -m cpu_kernels.calibration 2>&1 | tee "$OUT/calibration.txt" | tail -20
  log "bench"
  timeout 200 python3 -m cpu_kernels.bench --json "$OUT/kernels_70b.json" --shape 64,8,128 --no-compare --budget 120 \
    --cases 24x1000 1x1000 64x1024 shared:64x4096 copies:64x4096 --dtypes bf16 int8 int8-fast --threads 1 8 12 14 16 \
    > "$OUT/kernels_70b.txt" 2>&1 || status=1
  cat "$OUT/kernels_70b.txt"
fi
log "done, exit $status"
exit $status
