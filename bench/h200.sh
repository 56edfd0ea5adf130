#!/usr/bin/env bash
# The serving bench on one H200 in ten minutes: plain SGLang and ours on the shapes of docs/benchmarking.md.
#   [BUNDLE=folder] OUT=folder SGLANG_NEO_COMMIT=... bench/h200.sh SHAPE... [-- options of python -m bench.serving]
# SHAPE: 8b, 8b-capped (26,400 tokens of KV), 70b-20 (20 layers, 13,600 tokens of KV), 70b. Environment: ROUNDS (2),
# VARIANTS ("plain neo"), PIPELINED (1 adds neo:pipelined), SLOTS (adds neo:deferred with so many slots, e.g. "4 8"), BACKEND (triton), ROWS (most running
# requests: the shape's; deferred mode wants slots * (layers + 1) more), RATES (the sweep's), COUNT (requests of a sweep's rate),
# SECONDS_PER_SHAPE.
set -uo pipefail
cd "$(dirname "$0")/.."
shapes=() more=()
while [ $# -gt 0 ]; do
  if [ "$1" = -- ]; then shift; more=("$@"); break; fi
  shapes+=("$1"); shift
done
[ ${#shapes[@]} -gt 0 ] || shapes=(70b-20)
. bench/gpu_setup.sh
variants=()
for name in ${VARIANTS:-plain neo}; do variants+=(--variant "$name"); done
[ -z "${PIPELINED:-}" ] || variants+=(--variant "neo:pipelined=--neo-mode pipelined")
for slots in ${SLOTS:-}; do variants+=(--variant "neo:deferred=--neo-deferred-slots $slots"); done
common=(
  --load-format dummy --skip-tokenizer-init --attention-backend "${BACKEND:-triton}" --sampling-backend pytorch
  --grammar-backend none --disable-prefill-cuda-graph --disable-radix-cache --context-length 8192
)
for name in "${shapes[@]}"; do
  case $name in
    8b) model=llama-3.1-8b rates=${RATES:-4/12/20} rows=64 flags=(--mem-fraction-static 0.8) ;;
    8b-capped) model=llama-3.1-8b rates=${RATES:-2/4/8} rows=64 flags=(--mem-fraction-static 0.7 --max-total-tokens 26400) ;;
    70b-20) model=llama-3.1-70b-20-layers rates=${RATES:-1/3/5} rows=48 flags=(--mem-fraction-static 0.8 --max-total-tokens 13600) ;;
    70b) model=llama-3.1-70b rates=${RATES:-0.3/0.8} rows=48 flags=(--mem-fraction-static 0.975 --chunked-prefill-size 2048) ;;
    *) echo "error: no shape $name: there are 8b, 8b-capped, 70b-20, 70b" >&2; exit 2 ;;
  esac
  rows=${ROWS:-$rows}
  log "$name"
  seconds=${SECONDS_PER_SHAPE:-540}
  # No run begins in the last third; one that still takes too long is stopped, and its servers with it.
  timeout --kill-after=60 "$seconds" python3 -m bench.serving "$(shape $model)" --out "$OUT/serving_$name.json" \
    --logs "$work/logs-$name" --rounds "${ROUNDS:-2}" "${variants[@]}" --time-limit $((seconds * 2 / 3)) \
    --workload "backlog:prompt=900,output=200,count=$rows,concurrency=$rows" \
    --workload "sweep:rates=$rates,prompt=900,output=200,count=${COUNT:-40}" "${more[@]}" -- \
    "${common[@]}" --cuda-graph-max-bs "$rows" --max-running-requests "$rows" "${flags[@]}" 2>&1 \
    | tee "$OUT/serving_$name.txt" || status=1
  cat "$work/logs-$name"/*/*.log 2> /dev/null | grep -E "sglang_neo|Capture|KV Cache|rror" | cut -c1-300 > "$OUT/server_logs_$name.txt"
done
log "done, exit $status"
exit $status
