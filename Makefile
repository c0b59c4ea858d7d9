# make quickstart   set up, then train a tiny model by reinforcement learning (about two minutes)
# make test         set up, then run every test
# make lint         ruff and mypy
# make bench        the benchmarks; figures and how to read them: benchmarks/README.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test lint bench clean

quickstart: $(VENV)/.ready
	$(BIN)/rlcore train preset=quickstart

test: $(VENV)/.ready
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/data_plane.py
	$(BIN)/python benchmarks/step.py

$(VENV)/.ready: pyproject.toml
	@echo "== setting up $(VENV) with $$($(PYTHON) --version): about two minutes, once =="
	$(PYTHON) -m venv $(VENV)
	@echo "== installing $(TORCH) =="
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@echo "== installing rlcore and what its tests need =="
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) outputs
