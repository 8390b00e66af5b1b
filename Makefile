# Model Boss: everything a clone needs. `make help` lists the targets.
#
# `make setup` works in .venv (Python packages) and in ~/.cache/model-boss (the engine, which survives `make clean`).
# Variables: PYTHON, the interpreter .venv is made with (3.11 or newer); ARGS, passed on by test, faults, bench and demo.

.DEFAULT_GOAL := help
.PHONY: help setup engine demo test faults lint types bench clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
NO_PYTHON := no Python 3.11 or newer found: install one, or name it with `make PYTHON=/path/to/python3.11`

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed engine ## install everything (Python packages, llama-server); cheap when done before

demo: setup ## start the broker with two demo models and memory for one, and say what to try
	@$(BIN)/model-boss demo $(ARGS)

test: setup ## run all tests
	@$(BIN)/python scripts/fetch_redis.py
	@$(BIN)/python -m pytest $(ARGS)

faults: setup ## play 10,000 fault histories of the ledger, and more; ARGS="--seed 4711" shows one
	@$(BIN)/python -m tests.faults $(ARGS)

lint: $(VENV)/.installed ## check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.installed ## check types
	@$(BIN)/mypy

bench: setup ## measure against llama-server, its router mode, and reslock
	@$(BIN)/python -m benchmarks $(ARGS)
	@$(BIN)/python -m benchmarks.leases $(ARGS)

clean: ## remove what the other targets made in this directory
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo/.state benchmarks/out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "kept: the engine in $${XDG_CACHE_HOME:-~/.cache}/model-boss"

# The stamp is written last, so an interrupted installation is done again; a changed pyproject.toml installs again.
$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo '$(NO_PYTHON)' >&2; exit 1; }
	@echo "installing Python packages into $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[server,embedded,dev]'
	@touch $@

# 1: there is none yet. 2: MODEL_BOSS_LLAMA_SERVER names something that is not there, which a build would not cure.
engine: $(VENV)/.installed
	@$(BIN)/python -m inference.engines >/dev/null || { test $$? -eq 1 && $(BIN)/model-boss engines install llama-server; }
