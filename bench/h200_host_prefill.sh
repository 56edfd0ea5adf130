#!/usr/bin/env bash
# Prompts computed straight into host memory, on a CUDA machine that has torch but no package registry: build, check,
# measure a prompt larger than the device pool and a burst beside device rows.
#   BUNDLE=folder OUT=folder SGLANG_NEO_COMMIT=... bench/h200_host_prefill.sh [layers of the 70B shape, default 20] [more]
# "more": arguments of bench/host_prefill.py. BUNDLE, OUT: see bench/gpu_setup.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
layers=${1:-20}
shift || true
. bench/gpu_setup.sh
model=${TMPDIR:-/tmp}/random-70b-$layers
[ -d "$model" ] || python3 -m bench.random_model bench/shapes/llama-3.1-70b.json "$model" --layers "$layers" \
  > "$OUT/model.txt" 2>&1 & making=$!
log "GPU tests"
timeout 200 python3 -m pytest tests/gpu/test_host_prefill.py -m gpu -v -s -p no:cacheprovider > "$OUT/host_prefill_tests.txt" 2>&1 || status=1
grep -E "passed|failed|PASSED|FAILED|Error" "$OUT/host_prefill_tests.txt" | tail -20
wait $making || { cat "$OUT/model.txt"; exit 1; }
log "a prompt of 20,000 tokens on a device pool of 13,600, and a burst of 200 prompts, $layers layers"
timeout 360 python3 -m bench.host_prefill "$model" --out "$OUT/host_prefill.json" "$@" 2>&1 | tee "$OUT/host_prefill.txt" | tail -60 || status=1
log "done, exit $status"
exit $status
