#!/usr/bin/env bash
# Steps with host rows in CUDA graphs, on a CUDA machine that has torch but no package registry: build, measure.
#   BUNDLE=folder OUT=folder SGLANG_NEO_COMMIT=... bench/h200_captured.sh [layers of the 8B shape, default 32]
# BUNDLE, OUT: see bench/gpu_setup.sh. The tests: bench/gpu_tests.sh captured.
set -uo pipefail
cd "$(dirname "$0")/.."
layers=${1:-32}
. bench/gpu_setup.sh
model=${TMPDIR:-/tmp}/random-8b-$layers
[ -d "$model" ] || python3 -m bench.random_model bench/shapes/llama-3.1-8b.json "$model" --layers "$layers" \
  > "$OUT/model.txt" 2>&1 || { cat "$OUT/model.txt"; exit 1; }
log "a step and its parts, $layers layers"
timeout 240 python3 -m bench.hybrid_step "$model" --out "$OUT/hybrid_step.json" --stall 6 --profile profile 2>&1 \
  | tee "$OUT/hybrid_step.txt" | tail -60 || status=1
python3 -m sglang_neo.timeline profile --out "$OUT/timeline.json.gz" --picture "$OUT/timeline.png" || status=1
log "done, exit $status"
exit $status
