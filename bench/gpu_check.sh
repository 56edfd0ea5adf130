#!/usr/bin/env bash
# On a CUDA machine that has torch but no package registry: build, check and measure in one go.
#   BUNDLE=folder OUT=folder SGLANG_NEO_COMMIT=... bench/gpu_check.sh [decode rounds]
# BUNDLE holds an unpack.sh that puts SGLang's packages on PYTHONPATH; leave it out where SGLang is installed.
# Everything goes to OUT as it is made, so that a run that is cut short leaves what it had.
set -uo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-7}
mkdir -p "$OUT"
log() { echo "[$(date +%T)] $*"; }

if [ -n "${BUNDLE:-}" ]; then . "$BUNDLE/unpack.sh"; fi
log "building sglang_neo"
python3 -m pip install -q --no-index --no-deps --no-build-isolation --target "${SITE:-/tmp/sglang_neo_site}" . 2>&1 | tail -3
export PYTHONPATH="${SITE:-/tmp/sglang_neo_site}:$PYTHONPATH"
{ nvidia-smi; python3 -m cpu_kernels.info; python3 -c "import cpu_kernels; print(cpu_kernels.__file__)"; } > "$OUT/machine.txt" 2>&1
cat "$OUT/machine.txt" | tail -12

# The installed package, not the source tree, must be what runs: start from elsewhere.
work=$(mktemp -d); cp -r bench tests "$work"; cp pyproject.toml "$work"; cd "$work"

model=$(mktemp -d); cp bench/shapes/llama-3.1-8b.json "$model/config.json"
for backend in triton flashinfer; do
  log "decode speed, 8B shape, $backend"
  python3 -m bench.decode_speed --model-path "$model" --rows 64 --input-len 512 --output-len 129 --rounds "$rounds" \
    --vocabulary 128000 --logs "$OUT" --out "$OUT/decode_8b_$backend.json" -- \
    --load-format dummy --skip-tokenizer-init --attention-backend "$backend" --sampling-backend pytorch \
    --grammar-backend none --disable-prefill-cuda-graph --max-total-tokens 48000 --max-running-requests 64 \
    --cuda-graph-max-bs 64 --context-length 2048 --mem-fraction-static 0.4 2>&1 | tee "$OUT/decode_8b_$backend.txt"
  for kind in plain neo; do mv "$OUT/$kind.log" "$work/${kind}_$backend.log"; done
done
log "GPU tests"
python3 -m pytest tests/gpu -m gpu -q -p no:cacheprovider 2>&1 | tee "$OUT/gpu_tests.txt" | tail -15
cat "$work"/*.log | grep -E "sglang_neo|Capture|KV Cache|Decode batch|rror" | cut -c1-300 > "$OUT/server_logs.txt"
log "done"
