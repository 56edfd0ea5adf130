#!/usr/bin/env bash
# Builds the C++ tests with sanitizers and runs them.
#   cpu_kernels/sanitize.sh [asan|tsan|plain]...     default: asan tsan
# asan is AddressSanitizer with UndefinedBehaviorSanitizer. src/tests/test_workers.cpp gets the sources of the worker
# pool, every other src/tests/test_*.cpp all but the probe. TSan is for what threads do with each other: it gets the
# scalar kernels only, and not test_kernels, which is about what a single thread computes. plain is for emulators.
# Environment:
#   CXX      the compiler
#   TESTS    names to build and run; default: all
#   ISAS     whose kernels to build; default: scalar. "scalar amx_shim" adds the code of AVX2 and AMX, the latter with tiles
#            in software; all: every instruction set. They take up to a minute each to compile with sanitizers.
#   LDFLAGS  for the linker
#   RUN      what runs the tests: an emulator, or true to only build them
#   BUILD_DIR  where objects are kept; default: build/sanitize
set -euo pipefail
cd "$(dirname "$0")/src"
CXX=${CXX:-g++}
build_dir=${BUILD_DIR:-../../build/sanitize}
workers=(worker_pool.cpp handoff.cpp fake_device.cpp)
[ $# -gt 0 ] || set -- asan tsan

flags() {
  case $1 in
    # Checks by calls make slower programs, and compile in half the time.
    asan) echo "-fsanitize=address,undefined -fno-sanitize-recover=all --param asan-instrumentation-with-call-threshold=0" ;;
    tsan) echo "-fsanitize=thread" ;;
    plain) echo "" ;;
    *) echo "error: asan, tsan or plain, not '$1'" >&2; return 2 ;;
  esac
}

object_of() { echo "$folder/$(echo "${1%.cpp}" | tr / -).o"; }

# Compiles what is older than its source or any header, as many at a time as there are cores, and adds it to `objects`.
compile() {
  local folder=$1 options=$2 source object
  shift 2
  mkdir -p "$folder"
  for source in "$@"; do
    object=$(object_of "$source")
    if [ ! -e "$object" ] || [ "$source" -nt "$object" ] || [ "$newest_header" -nt "$object" ]; then
      printf '%s\0%s\0' "$source" "$object"
    fi
  done | xargs -0 -r -n 2 -P "$(nproc)" sh -c \
    'exec "$1" -std=c++17 -Og -g1 -fno-omit-frame-pointer -Wall -Wextra -pthread -I. $2 -c "$3" -o "$4"' sh "$CXX" "$options"
  for source in "$@"; do objects+=("$(object_of "$source")"); done
}

newest_header=$(find . -name '*.hpp' -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2-)
for kind in "$@"; do
  isas=${ISAS:-scalar}
  [ "$kind" != tsan ] || isas=scalar
  extra=$(flags "$kind")
  only=
  if [ "$isas" = all ]; then
    kernels=(*/kernels.cpp)
  else
    kernels=() tables=
    for isa in $isas; do
      kernels+=("$isa/kernels.cpp")
      tables+="&$isa::kTable,"
    done
    only="-DCPU_KERNELS_ONLY=$tables"
  fi
  out=$build_dir/$kind-${isas// /-}
  for test in tests/test_*.cpp; do
    name=$(basename "$test" .cpp)
    if [ -n "${TESTS:-}" ] && [[ " $TESTS " != *" $name "* ]]; then continue; fi
    if [ "$kind $name" = "tsan test_kernels" ]; then continue; fi
    sources=("$test" "${workers[@]}") objects=()
    if [ "$name" != test_workers ]; then
      for source in *.cpp; do
        [[ " ${workers[*]} probe.cpp " == *" $source "* ]] || sources+=("$source")
      done
      compile "$out" "$extra" "${kernels[@]}"
    fi
    compile "$out" "$extra $only" "${sources[@]}"
    # shellcheck disable=SC2086
    "$CXX" $extra -pthread "${objects[@]}" ${LDFLAGS:-} -o "$out/$name"
    echo "$kind: $name"
    # shellcheck disable=SC2086
    UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" ${RUN:-} "$out/$name"
  done
done
