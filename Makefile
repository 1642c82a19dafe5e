# `make help` lists the tasks. All that must be there: Python 3.10 or later, Rust (https://rustup.rs), make.

PYTHON ?= python3
BIN := .venv/bin
CLIENTS := .venv-clients/bin
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-clients bench bench-kernels lint format build clean

export VIRTUAL_ENV := $(CURDIR)/.venv
export PIP_QUIET := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport CONDA_PREFIX

help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build ## Build Ster and run `ster extract` on the toy model
	@echo '$$ ster extract --model fixtures/toy-llama --prompts fixtures/prompts.json'
	@$(BIN)/ster extract --model fixtures/toy-llama --prompts fixtures/prompts.json
	@echo
	@$(BIN)/python examples/show.py activations.json

test: $(BIN)/.tools build ## Run all tests: Rust, then Python
	@mkdir -p target
	cargo test --workspace --quiet 2>&1 | tee target/cargo-test.log
	$(BIN)/python -m pytest -q 2>&1 | tee target/pytest.log
	@echo
	@awk '/^test result: / { passed += $$4; failed += $$6; ignored += $$8 } \
		END { printf "cargo: %d passed, %d failed, %d ignored\n", passed, failed, ignored }' target/cargo-test.log
	@echo "pytest: $$(tail -n 1 target/pytest.log)"

test-clients: $(CLIENTS)/.tools ## Run other people's clients against `ster serve`, in an environment of their own
	@VIRTUAL_ENV=$(CURDIR)/.venv-clients $(BIN)/maturin develop --release --quiet --extras serve
	$(CLIENTS)/python -m pytest -q -m clients tests/clients

bench: build ## Time Ster and its peers: make bench MODEL=DIR [PEER_PYTHON=...]
	$(BIN)/python -m benchmarks --model $(MODEL) $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

bench-kernels: ## Time each kernel beside the peaks of this machine: make bench-kernels [FILTER=regex]
	cargo bench -p ster-core --bench kernels -- --quiet $(if $(FILTER),'$(FILTER)')

lint: $(BIN)/.tools build ## Check formatting, lints, types, and the stub against the binary
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest ster._native

format: $(BIN)/.tools ## Format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format .

build: $(BIN)/maturin ## Build Ster into .venv
	@$(BIN)/maturin develop --release --quiet

clean: ## Remove everything built
	rm -rf .venv .venv-clients target python/ster/*.so activations.json

# Always through cargo, so that no stale binary is ever tested; a build with nothing to do takes a second.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Ster needs Python 3.10 or later; set PYTHON=python3.x")'
	@$(PYTHON) -m venv .venv

$(BIN)/maturin: | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2'

$(BIN)/.tools: pyproject.toml | $(BIN)/maturin
	@$(BIN)/maturin develop --release --quiet --extras test
	@touch $@

# vllm-lens asks for Python 3.12, vLLM and torch; its client needs none of them.
$(CLIENTS)/.tools: tests/clients/requirements.txt | $(BIN)/maturin
	@$(PYTHON) -m venv .venv-clients
	@$(CLIENTS)/python -m pip install -r tests/clients/requirements.txt
	@$(CLIENTS)/python -m pip install --no-deps --ignore-requires-python vllm-lens==1.3.0
	@touch $@
