#!/usr/bin/env bash
# Host rows on a CUDA machine that has torch but no package registry: build, check the copies, compare log-probabilities.
#   BUNDLE=folder OUT=folder SGLANG_NEO_COMMIT=... bench/h200_host_rows.sh [layers of the 8B shape, default 32] [more flags]
# BUNDLE, OUT: see bench/gpu_setup.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
layers=${1:-32}
shift || true
. bench/gpu_setup.sh
if [ -n "${KERNELS:-}" ]; then
  log "CPU kernels"
  timeout 60 python3 -m cpu_kernels.calibration > "$OUT/calibration.txt" 2>&1
  timeout 150 python3 -m cpu_kernels.bench --json "$OUT/kernels.json" --shape 64,8,128 --no-compare --budget 65 \
    --cases 24x1000 1x1000 64x1024 copies:64x4096 shared:64x4096 --dtypes bf16 int8 int8-fast --threads 1 12 14 16 \
    > "$OUT/kernels.txt" 2>&1 || status=1
  cat "$OUT/kernels.txt"
  timeout 40 python3 -m cpu_kernels.bench --json "$OUT/kernels_isas.json" --shape 64,8,128 --no-compare --budget 12 --repetitions 3 \
    --cases 24x1000 --dtypes bf16 int8 int8-fast fp16 --isa avx512_bf16 avx512 avx2 --threads 16 > "$OUT/kernels_isas.txt" 2>&1 || status=1
  cat "$OUT/kernels_isas.txt"
  { python3 -m cpu_kernels.workers --reserve 2; python3 -m cpu_kernels.workers --reserve 2 --attention 1x1; } > "$OUT/round_trip.txt" 2>&1
  timeout 40 python3 -m bench.handoff_gpu --threads 14 --repetitions 30 --out "$OUT/handoff_gpu.json" > "$OUT/handoff_gpu.txt" 2>&1
  cat "$OUT/round_trip.txt" "$OUT/handoff_gpu.txt"
fi
model=${TMPDIR:-/tmp}/random-8b-$layers
[ -d "$model" ] || python3 -m bench.random_model bench/shapes/llama-3.1-8b.json "$model" --layers "$layers" \
  > "$OUT/model.txt" 2>&1 & making=$!
if [ -e tests/gpu/test_transfer.py ]; then
  log "GPU tests of the copies"
  timeout 70 python3 -m pytest tests/gpu/test_transfer.py -m gpu -v -s -p no:cacheprovider > "$OUT/transfer_tests.txt" 2>&1 || status=1
  tail -25 "$OUT/transfer_tests.txt"
fi
wait $making || { cat "$OUT/model.txt"; exit 1; }
log "log-probabilities, $layers layers"
timeout 300 python3 -m bench.host_rows_logprobs "$model" --out "$OUT/logprobs.json" --logs logs "$@" -- --mem-fraction-static 0.6 2>&1 \
  | tee "$OUT/logprobs.txt" || status=1
cp logs/host/*.log "$OUT/server_host.log"
tail -5 "$OUT/server_host.log"
log "done, exit $status"
exit $status
