# Every target does its own set-up: a checkout, Python 3.11 and make are enough. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash

BIN := .venv/bin
LOCK := deploy/requirements/cpu.lock
# Options for pytest, such as PYTEST_ARGS='-k gate'.
PYTEST_ARGS ?=
# Arrivals in the Azure CSV format for `make demo`; options of the demo itself go in DEMO_ARGS.
TRACE ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

SUITES := $(wildcard tests/unit tests/contract tests/scenario)
SOURCES := $(wildcard vllm_coserve kernels rl_driver deploy tests setup.py)

# Nothing is written outside the checkout, whatever the libraries' defaults.
export XDG_CACHE_HOME := $(CURDIR)/.cache
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
# The current folder stays off sys.path, so that kernels/ is not taken for the public package of that name.
export PYTHONSAFEPATH := 1
export VLLM_NO_USAGE_STATS := 1
unexport PYTHONPATH PYTHONHOME

.PHONY: help setup demo bench-core bench-coserve bench-driver bench-training bench-weights bench-broadcast bench-faults soak test promtool unit lint format lock clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## make .venv, the pinned CPU environment, with this checkout in it
	@deploy/setup/venv.sh

demo: setup ## serve a model, lend its idle time to a second one, write out/demo (TRACE=file.csv DEMO_ARGS=...)
	$(BIN)/python -m vllm_coserve.demo --out out/demo $(if $(TRACE),--trace $(TRACE)) $(DEMO_ARGS)

bench-core: setup ## what sharing costs: pages, hand-over, overhead, reclaims (about 15 minutes; BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.core $(BENCH_ARGS)

bench-coserve: setup ## the paper's co-serving experiments (about 30 minutes; TRACE=file.csv BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.coserve $(if $(TRACE),--trace $(TRACE)) $(BENCH_ARGS)

bench-driver: setup ## turns over dedicated and borrowed engines, the proxy's cost (about 20 minutes; TRACE=... BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.driver $(if $(TRACE),--trace $(TRACE)) $(BENCH_ARGS)

bench-training: setup ## staleness 0, 1 and 3, GRPO and DAPO, on two engines (about 20 minutes; BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.training $(BENCH_ARGS)

bench-weights: setup ## weight updates: bytes, speed, links, pauses, 1,000 exact versions (about 18 minutes; BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.weights $(BENCH_ARGS)

bench-broadcast: setup ## weights to 2 to 64 workers, star and chains, under an uplink cap (about 6 minutes; BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.broadcast $(BENCH_ARGS)

bench-faults: setup ## kills and stops under load (about 25 minutes; TRACE=file.csv BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.faults $(if $(TRACE),--trace $(TRACE)) $(BENCH_ARGS)

soak: setup ## half an hour under load, kills and weight updates (TRACE=file.csv BENCH_ARGS=...)
	$(BIN)/python -m tests.bench.soak $(if $(TRACE),--trace $(TRACE)) $(BENCH_ARGS)

test: lint promtool ## everything that runs without a GPU: lint, then unit, contract and scenario tests
	@echo "== tests: $(notdir $(SUITES))"
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(SUITES) --session-timeout=3600 --durations=10 --tb=short $(PYTEST_ARGS)

promtool: setup
	@deploy/setup/promtool.sh

unit: setup ## the fast tests
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

lint: setup ## style, formatting and the rules of who imports whom
	@echo "== ruff check" && $(BIN)/ruff check $(SOURCES)
	@echo "== ruff format" && $(BIN)/ruff format --check $(SOURCES)
	@echo "== import rules" && $(BIN)/lint-imports

format: setup ## put the sources into the format that `make lint` asks for
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

lock: setup ## resolve the pinned versions anew (needs the network)
	@$(BIN)/python deploy/setup/lock.py $(LOCK)

clean: ## remove what builds, tests and the demo left
	@rm -rf out build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf

distclean: clean ## also remove .venv and the download cache
	@rm -rf .venv .cache *.egg-info
