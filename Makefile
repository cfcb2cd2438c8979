# A Python from 3.11 on; `make PYTHON=/path/to/python3.12 ...` picks another.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG := configs/quickstart.py
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help quickstart models test lint format clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' \
	  Makefile

quickstart: $(STAMP)  ## Train the search agent on this machine (ARGS=flags).
	$(BIN)/python -m launch.train --config=$(CONFIG) $(ARGS)

models: $(STAMP)  ## Download the small models that tests and examples use.
	$(BIN)/python -m launch.models $(ARGS)

# Two processes: most of a test's time is a compiler that runs on one core.
test: $(STAMP)  ## Run the tests (ARGS=pytest arguments).
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)  ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Format the code and sort its imports.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and caches; runs stay.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache \
	  .ruff_cache .hypothesis

# The stamp comes last, so that an interrupted installation is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11; name a newer one:" \
	    "make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
