# `make test` and `make demo` do all of their own set-up: they need make and Python 3.11 or newer, nothing else.

PYTHON ?= python3
VENV ?= .venv
# A pip constraints file to install under; empty for the newest of everything.
CONSTRAINTS ?=
# Arguments for pytest: make test PYTEST_ARGS="-k wire".
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_INSTALLED := $(VENV)/.installed-bench
WHEEL := $(VENV)/.wheel
SOURCES := $(shell find orbax_explicit -name '*.py') $(wildcard orbax_explicit/py.typed README.md LICENSE)
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

# A constraint that this machine sets for other work must not decide what is tested here.
export PIP_CONSTRAINT := /dev/null

.PHONY: test lint pytest demo bench clean

test: lint pytest

lint: $(INSTALLED)
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format"
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy

# The wheel precedes the source tree on the path, here and in every process that a test starts.
pytest: $(INSTALLED) $(WHEEL)
	@echo "== pytest, on the built wheel"
	@PYTHONPATH="$(abspath $(WHEEL))" $(BIN)/pytest -n $(PYTEST_WORKERS) --dist loadgroup $(PYTEST_ARGS)

demo: $(INSTALLED)
	@$(BIN)/orbax-explicit demo

bench: $(BENCH_INSTALLED)
	@for benchmark in benchmarks/bench_*.py; do echo "== $$benchmark"; $(BIN)/python "$$benchmark" || exit 1; done

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "orbax-explicit needs Python 3.11 or newer; say which: make PYTHON=python3.12")'
	@echo "== $(VENV): $$($(PYTHON) --version), the package and what it needs (a minute or two, once)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[test]'
	@touch $@

# Beside what the tests need: who else saves arrays.
$(BENCH_INSTALLED): $(INSTALLED)
	@$(PIP) install $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[bench]'
	@touch $@

$(WHEEL): $(INSTALLED) $(SOURCES)
	@echo "== $(VENV): building the wheel"
	@rm -rf $@ $@.built
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir $@.built .
	@$(PIP) install --no-deps --target $@ $@.built/*.whl
	@touch $@
