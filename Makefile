# make train        a virtual environment with what the README's commands need, and the embedded job
# make test         ruff, mypy, pytest
# make test-all     the slow tests too
# make readme       the README's commands, in a fresh environment in a fresh copy
# make benchmarks   every benchmark once, small: 20 minutes
# make docs         the manual, warnings being errors
# make gpu          25 minutes on a GPU: checks, memory, speed, then the experiments

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Several test processes share the cores, so each keeps to one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: train test test-all check format docs readme benchmarks gpu clean

train: $(VENV)/.train
	$(BIN)/nwise train

test: check
	$(PYTEST)

test-all: check
	$(PYTEST) -m "slow or not slow"

check: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: its version is pinned, so no other package asks for another build.
$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"nwise needs Python 3.11 or later. Found {v}; give another one, `make PYTHON=python3.13`.")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[app]'
	touch $@

# Dependency groups need a newer pip than Python brings.
$(VENV)/.tools: $(VENV)/.train
	$(PIP) --upgrade pip
	$(PIP) --group test --editable '.[app,data,hf]'
	touch $@

docs: $(VENV)/.tools
	$(BIN)/python -m sphinx -W --keep-going --fail-on-warning -q -b html -c docs . docs/_build/html
	@echo "Manual: docs/_build/html/index.html"

readme:
	$(PYTHON) .ci/readme.py

benchmarks: $(VENV)/.tools
	$(BIN)/python .ci/benchmarks.py

gpu: $(VENV)/.tools
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
