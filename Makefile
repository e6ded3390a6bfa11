# make train    a virtual environment, the package, and the embedded job
# make test     ruff, mypy, pytest; ten to thirty minutes on two cores
# make test-all the slow tests too
# make docs     the manual, warnings being errors

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Several test processes share the cores, so that each should keep to one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: train test test-all check format docs clean

train: $(STAMP)
	$(BIN)/nwise train

test: check
	$(PYTEST)

test-all: check
	$(PYTEST) -m "slow or not slow"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: its version is pinned so that no other package asks for another build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[data,docs,hf,html,tensorboard,wandb,dev]'
	touch $(STAMP)

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going --fail-on-warning -q -b html docs docs/_build/html
	@echo "Manual: docs/_build/html/index.html"

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
