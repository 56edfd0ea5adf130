# To be sourced by the scripts for a CUDA machine that has torch but no package registry, from the project's folder, with
#   OUT      folder for everything that is made, as it is made, so that a run that is cut short leaves what it had
#   BUNDLE   folder with an unpack.sh that puts SGLang's packages on PYTHONPATH, and wheels of what else we need; not set
#            where SGLang is installed
#   SITE     folder in which to build, not set: a temporary one. A second script given the same folder builds nothing
#   MODELS   folder with SmolLM2-135M-Instruct, as `make setup` makes it, for tests that want a real model; may be unset
# Builds the project, and goes on in a folder without its source tree: the installed package must be what runs.
# Afterwards: log MESSAGE, shape NAME (a folder with only that config.json), and status, 0 so far.
status=0
mkdir -p "$OUT"
log() { echo "[$(date +%T)] $*"; }
if [ -e "${SITE:-}/environment" ]; then
  . "$SITE/environment"
else
  if [ -n "${BUNDLE:-}" ]; then . "$BUNDLE/unpack.sh"; fi
  log "building"
  site=${SITE:-$(mktemp -d)}
  python3 -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" . 2>&1 | tail -5
  for wheel in ${BUNDLE:+"$BUNDLE"/*.whl}; do
    [ ! -e "$wheel" ] || python3 -m pip install -q --no-index --no-deps --target "$site" "$wheel" 2>&1 | tail -5
  done
  [ -d "$site/sglang_neo" ] || exit 1
  export PYTHONPATH="$site:${PYTHONPATH:-}"
  export -p | grep -E ' (PYTHON|SGLANG)' > "$site/environment"
fi
work=$(mktemp -d)
cp -r bench tests docs README.md pyproject.toml cpu_kernels/src "$work"
[ -z "${MODELS:-}" ] || ln -s "$MODELS" "$work/models"
cd "$work" || exit 1
shape() {
  mkdir -p "$work/shapes/$1"
  cp "bench/shapes/$1.json" "$work/shapes/$1/config.json"
  echo "$work/shapes/$1"
}
