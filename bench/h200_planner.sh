#!/usr/bin/env bash
# Mode auto beside plain SGLang on one H200, and with its cores burned; in ten minutes about two of
#   [BUNDLE=folder] [SITE=folder] OUT=folder SGLANG_NEO_COMMIT=... bench/h200_planner.sh 8b|8b-capped|70b-20|burned...
# Shapes are those of bench/h200.sh: a backlog (900 + 200 tokens), one of short answers (900 + 32) and arrivals at a rate
# below what plain SGLang can do. burned: bench/burned_cores.py with 20 layers of the 70B shape. BUNDLE, OUT, SITE: see
# bench/gpu_setup.sh; without SITE each of them builds anew. Environment: SECONDS_EACH (290).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
seconds=${SECONDS_EACH:-290} status=0
for what in "${@:-70b-20}"; do
  case $what in
    8b) backlog=300 concurrency=200 rate=6 host_gb=30 ;;
    8b-capped) backlog=400 concurrency=300 rate=6 host_gb=30 ;;
    70b-20) backlog=160 concurrency=160 rate=3 host_gb=20 ;;
    burned) ;;
    *) echo "error: no $what: there are 8b, 8b-capped, 70b-20, burned" >&2; exit 2 ;;
  esac
  if [ "$what" = burned ]; then
    (
      . bench/gpu_setup.sh
      timeout "$seconds" python3 -m bench.burned_cores "$(shape llama-3.1-70b-20-layers)" --out "$OUT/burned_cores.json" \
        --device cuda --dtype bfloat16 --load-format dummy --pool 13600 --rows 150 --tokens 900 --host-gb 20 --phase 12 \
        --per-core 1 --vocabulary 128000 > "$OUT/burned_cores.txt" 2>&1
      code=$?
      grep -E "sglang_neo planner" "$OUT/burned_cores.txt" | tail -20
      sed -n '/"phases"/,$p' "$OUT/burned_cores.txt"
      exit $code
    ) || status=1
    continue
  fi
  BACKLOG=$backlog CONCURRENCY=$concurrency RATES=$rate COUNT=60 ROUNDS=${ROUNDS:-1} NAME="auto-$what" SECONDS_PER_SHAPE=$seconds \
    VARIANTS="plain;neo=--neo-host-kv-size $host_gb --max-running-requests $((concurrency + 10))" bash bench/h200.sh "$what" -- \
    --workload "backlog:prompt=900,output=32,count=$backlog,concurrency=$concurrency" || status=1
done
exit $status
