#!/usr/bin/env bash
# The serving bench on one H200 in ten minutes: plain SGLang and ours on the shapes of docs/benchmarking.md.
#   [BUNDLE=folder] OUT=folder SGLANG_NEO_COMMIT=... bench/h200.sh SHAPE... [-- options of python -m bench.serving]
# SHAPE: 8b, 8b-capped (26,400 tokens of KV), 70b-20 (20 layers, 13,600 tokens of KV), 70b. Environment: ROUNDS (2),
# VARIANTS (separated by semicolons; "plain;neo"), BACKEND (triton), ROWS (most running requests: the shape's), PROMPT and
# OUTPUT (tokens of each request; 900 and 200), BACKLOG (requests of the backlog: ROWS), CONCURRENCY (so many at once:
# BACKLOG), CUT (seconds after which the backlog ends; none), RATES (the sweep's; "" for none), COUNT (requests of a
# sweep's rate), SECONDS_PER_SHAPE, NAME (of the files).
# Throughput in the fast modes, where host rows are many and prompts should reach host memory soon:
#   BACKLOG=400 CONCURRENCY=190 RATES= VARIANTS="plain;neo:pipelined=--neo-host-prefill-rate 1000 --max-running-requests 36;neo:deferred=--neo-\
#   deferred-slots 8 --neo-host-prefill-rate 1000 --max-running-requests 190" bench/h200.sh 70b-20
# "neo:symmetric" has everything on the host, as FastDecode has.
# "-- --together" keeps all servers up, which saves starts; no two of ours at once, for they would share the cores.
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
IFS=';' read -ra named <<< "${VARIANTS:-plain;neo}"
for variant in "${named[@]}"; do variants+=(--variant "$variant"); done
common=(
  --load-format dummy --skip-tokenizer-init --attention-backend "${BACKEND:-triton}" --sampling-backend pytorch
  --grammar-backend none --disable-prefill-cuda-graph --disable-radix-cache --context-length 8192
)
for name in "${shapes[@]}"; do
  case $name in
    8b) model=llama-3.1-8b rates=${RATES-4/12/20} rows=64 flags=(--mem-fraction-static 0.8) ;;
    8b-capped) model=llama-3.1-8b rates=${RATES-2/4/8} rows=64 flags=(--mem-fraction-static 0.7 --max-total-tokens 26400) ;;
    70b-20) model=llama-3.1-70b-20-layers rates=${RATES-1/3/5} rows=48 flags=(--mem-fraction-static 0.8 --max-total-tokens 13600) ;;
    70b) model=llama-3.1-70b rates=${RATES-0.3/0.8} rows=48 flags=(--mem-fraction-static 0.975 --chunked-prefill-size 2048) ;;
    *) echo "error: no shape $name: there are 8b, 8b-capped, 70b-20, 70b" >&2; exit 2 ;;
  esac
  rows=${ROWS:-$rows} backlog=${BACKLOG:-${ROWS:-$rows}} file=${NAME:-$name}
  workloads=(--workload "backlog:prompt=${PROMPT:-900},output=${OUTPUT:-200},count=$backlog,concurrency=${CONCURRENCY:-$backlog}${CUT:+,seconds=$CUT}")
  [ -z "$rates" ] || workloads+=(--workload "sweep:rates=$rates,prompt=${PROMPT:-900},output=${OUTPUT:-200},count=${COUNT:-40}")
  log "$name"
  seconds=${SECONDS_PER_SHAPE:-540}
  # No run begins in the last third; one that still takes too long is stopped, and its servers with it.
  timeout --kill-after=60 "$seconds" python3 -m bench.serving "$(shape $model)" --out "$OUT/serving_$file.json" \
    --logs "$work/logs-$file" --rounds "${ROUNDS:-2}" "${variants[@]}" --time-limit $((seconds * 2 / 3)) \
    "${workloads[@]}" "${more[@]}" -- \
    "${common[@]}" --cuda-graph-max-bs "$rows" --max-running-requests "$rows" "${flags[@]}" 2>&1 \
    | tee "$OUT/serving_$file.txt" || status=1
  cat "$work/logs-$file"/*/*.log 2> /dev/null | grep -E "sglang_neo|Capture|KV Cache|rror" | cut -c1-300 > "$OUT/server_logs_$file.txt"
done
log "done, exit $status"
exit $status
