#!/usr/bin/env bash
# GPU tests side by side (most of their time is the compilation of kernels), on a machine without a package registry.
#   [BUNDLE=folder] [SITE=folder] OUT=folder bench/gpu_tests.sh FILE[:WORDS]...
# FILE: tests/gpu/test_FILE.py; WORDS: of pytest's -k. Each argument is a process. BUNDLE, OUT, SITE: see gpu_setup.sh.
# Environment: LIMIT (240), seconds for each.
set -uo pipefail
cd "$(dirname "$0")/.."
. bench/gpu_setup.sh
running=()
for some in "$@"; do
  file=${some%%:*} words=${some#"${some%%:*}"}
  timeout "${LIMIT:-240}" python3 -m pytest "tests/gpu/test_$file.py" -m gpu -v -s -k "${words#:}" -p no:cacheprovider \
    --durations=5 > "$work/tests-$some.log" 2>&1 &
  running+=($!)
done
for one in "${running[@]}"; do wait "$one" || status=1; done
cat "$work"/tests-*.log > "$OUT/gpu_tests.txt"
grep -hE "passed|failed|PASSED|FAILED|Error" "$work"/tests-*.log | tail -80
log "done, exit $status"
exit $status
