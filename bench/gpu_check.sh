#!/usr/bin/env bash
# On a CUDA machine that has torch but no package registry: build, check and measure in one go.
#   BUNDLE=folder OUT=folder SGLANG_NEO_COMMIT=... bench/gpu_check.sh [decode rounds] [pytest options]
# 0 decode rounds: tests only.
# BUNDLE, OUT: see bench/gpu_setup.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-7}
shift || true
. bench/gpu_setup.sh
{ nvidia-smi; python3 -m cpu_kernels.info; } > "$OUT/machine.txt" 2>&1
tail -12 "$OUT/machine.txt"

mkdir llama-3.1-8b
cp bench/shapes/llama-3.1-8b.json llama-3.1-8b/config.json
for backend in triton flashinfer; do
  if [ "$rounds" = 0 ]; then break; fi
  log "decode speed, 8B shape, $backend"
  CUDA_VISIBLE_DEVICES=0 python3 -m bench.decode_speed --model-path llama-3.1-8b --rows 64 --input-len 512 \
    --output-len 129 --rounds "$rounds" --vocabulary 128000 --logs "logs-$backend" \
    --out "$OUT/decode_8b_$backend.json" -- \
    --load-format dummy --skip-tokenizer-init --attention-backend "$backend" --sampling-backend pytorch \
    --grammar-backend none --disable-prefill-cuda-graph --max-total-tokens 48000 --max-running-requests 64 \
    --cuda-graph-max-bs 64 --context-length 2048 --mem-fraction-static 0.4 2>&1 | tee "$OUT/decode_8b_$backend.txt" || status=1
done
cat logs-*/*/*.log 2> /dev/null | grep -E "sglang_neo|Capture|KV Cache|rror" | cut -c1-300 > "$OUT/server_logs.txt"
log "GPU tests"
python3 -m pytest tests/gpu -m gpu -v -p no:cacheprovider "$@" > "$OUT/gpu_tests.txt" 2>&1 || status=1
tail -15 "$OUT/gpu_tests.txt"
log "done, exit $status"
exit $status
