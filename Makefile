# Everything runs in .venv, which `install` makes with the exact versions of configs/requirements.lock.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
REFERENCE_STAMP := .venv/.installed-reference
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint configs/requirements.lock

.PHONY: install serve test test-slow test-reference lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml configs/requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || (echo "ellm-serve needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)" && exit 1)
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[test,serve]'
	@touch $@

$(REFERENCE_STAMP): $(STAMP)
	$(PIP) --editable '.[test,serve,reference]'
	@touch $@

serve: install
	$(BIN)/ellm-serve serve --model builtin

test: install
	$(BIN)/python -m pytest -q -m "not slow and not reference and not peer and not emulator"

test-slow: install
	$(BIN)/python -m pytest -q -m "slow and not reference and not peer and not emulator"

test-reference: $(REFERENCE_STAMP)
	$(BIN)/python -m pytest -q -m reference

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks.machine --quick
	$(BIN)/python -m benchmarks.kernels --quick
	$(BIN)/python -m benchmarks.engine --quick --model builtin
	$(BIN)/python -m benchmarks.serving --quick

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
