#!/usr/bin/env bash
# Steps with host rows in CUDA graphs, on a CUDA machine that has torch but no package registry: build, check, measure.
#   BUNDLE=folder OUT=folder SGLANG_NEO_COMMIT=... bench/h200_captured.sh [layers of the 8B shape, default 32]
# BUNDLE, OUT: see bench/gpu_setup.sh. TESTS: words of pytest's -k, each a process; default: all tests
# of tests/gpu/FILE.py (test_captured). STEP=0: the tests alone.
set -uo pipefail
cd "$(dirname "$0")/.."
layers=${1:-32}
. bench/gpu_setup.sh
model=${TMPDIR:-/tmp}/random-8b-$layers
[ -d "$model" ] || python3 -m bench.random_model bench/shapes/llama-3.1-8b.json "$model" --layers "$layers" \
  > "$OUT/model.txt" 2>&1 & making=$!
log "GPU tests"
# Side by side: most of their time is the compilation of kernels.
tests=()
for some in ${TESTS:-triton flashinfer wrong_hand_off workers_that_stop}; do
  timeout 240 python3 -m pytest tests/gpu/${FILE:-test_captured}.py -m gpu -v -k "$some" -p no:cacheprovider > "$work/tests-$some" 2>&1 &
  tests+=($!)
done
for running in "${tests[@]}"; do wait "$running" || status=1; done
cat "$work"/tests-* > "$OUT/captured_tests.txt"
grep -E "passed|failed|PASSED|FAILED|Error" "$OUT/captured_tests.txt" | tail -20
wait $making || { cat "$OUT/model.txt"; exit 1; }
[ "${STEP:-1}" = 1 ] || exit $status
log "a step and its parts, $layers layers"
timeout 240 python3 -m bench.hybrid_step "$model" --out "$OUT/hybrid_step.json" --stall 6 --profile profile 2>&1 \
  | tee "$OUT/hybrid_step.txt" | tail -60 || status=1
python3 -m sglang_neo.timeline profile --out "$OUT/timeline.json.gz" --picture "$OUT/timeline.png" || status=1
log "done, exit $status"
exit $status
