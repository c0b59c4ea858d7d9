# make quickstart   set up, then train a tiny model by reinforcement learning (about a minute)
# make test         set up, then run all tests of the core and of the plugins with quick tests
# make test-plugins run the tests of all plugins that share the core's virtual environment
# make test-vllm    run the tests of rlcore-vllm with the real engine, in its own virtual environment
# make test-sglang  the same for rlcore-sglang; some of its tests use two virtual environments
# make test-gpu     run the tests that need a GPU, in the virtual environments that exist; report in outputs/gpu.txt
# make lint         run ruff and mypy
# make dist         build wheels and sdists of all packages from the last commit into dist/, reproducibly, and check them
# make bench        run the benchmarks; results: benchmarks/README.md
#
# Engines pin conflicting versions, so each has its own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PIP_OPTIONS := --quiet --disable-pip-version-check
INSTALL := -m pip install $(PIP_OPTIONS)
export OMP_NUM_THREADS ?= 1

# Plugins with an engine, each with its own virtual environment.
ENGINES := $(patsubst plugins/rlcore-%/requirements-cpu.txt,%,$(wildcard plugins/rlcore-*/requirements-cpu.txt))
# Plugins that share the core's virtual environment; each has its own tests.
PLUGINS := $(filter-out $(ENGINES:%=plugins/rlcore-%),$(patsubst %/,%,$(wildcard plugins/rlcore-*/)))
EXTRAS_rlcore-fsdp := [lora]
EXTRAS_rlcore-rewards := [math]
QUICK := $(addprefix plugins/rlcore-,algorithms environments report rewards trackers workbench)
TESTED ?= $(PLUGINS)
# Tests of the core that need plugins, and the number of processes for all others.
LAST := tests/test_docs.py tests/test_examples.py
WORKERS ?= 2

# FOLDER:VENV of each package with tests that need a GPU.
GPU_FOLDERS := $(sort $(patsubst %/tests/,%,$(dir $(shell grep -l "mark\.gpu" plugins/*/tests/*.py))))
GPU_TESTED := $(foreach folder,$(GPU_FOLDERS),$(folder):$(if $(filter $(ENGINES:%=plugins/rlcore-%),$(folder)),.venv-$(folder:plugins/rlcore-%=%),$(VENV)))
GPU_REPORT := $(CURDIR)/outputs/gpu.txt

.PHONY: quickstart test test-plugins $(ENGINES:%=test-%) test-gpu lint dist bench clean

quickstart: $(VENV)/.ready
	$(BIN)/rlcore train preset=quickstart

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(LAST:%=--ignore=%)
	@$(MAKE) --no-print-directory test-plugins TESTED="$(QUICK)"
	@echo "== tests of the core that need a plugin =="
	$(BIN)/python -m pytest $(LAST)

test-plugins: $(VENV)/.plugins
	@for plugin in $(TESTED); do \
		echo "== tests of $$plugin =="; \
		(cd $$plugin && $(CURDIR)/$(BIN)/python -m pytest) || exit 1; \
	done

test-sglang: $(VENV)/.ready
$(ENGINES:%=test-%): test-%: .venv-%/.ready
	@echo "== tests of plugins/rlcore-$* =="
	cd plugins/rlcore-$* && $(CURDIR)/.venv-$*/bin/python -m pytest
	@for file in $(wildcard plugins/*/tests/test_*_with_$*.py); do \
		echo "== $$file =="; \
		(cd $$(dirname $$file)/.. && $(CURDIR)/.venv-$*/bin/python -m pytest tests/$$(basename $$file)) || exit 1; \
	done

test-gpu:
	@mkdir -p $(dir $(GPU_REPORT))
	@{ date; uname -a; nvidia-smi && nvidia-smi topo -m; } >$(GPU_REPORT) 2>&1 || echo "nvidia-smi failed: see $(GPU_REPORT)"
	@failed=0; \
	for tested in $(GPU_TESTED); do \
		folder=$${tested%%:*}; python=$(CURDIR)/$${tested#*:}/bin/python; \
		echo "== $$folder in $${tested#*:} ==" | tee -a $(GPU_REPORT); \
		{ $$python -m pip list --format=freeze && cd $$folder && $$python -m pytest -m gpu -v -ra --durations=20; } \
			>>$(GPU_REPORT) 2>&1 || failed=1; \
		cd $(CURDIR); tail -n 1 $(GPU_REPORT); \
	done; \
	echo "report: $(GPU_REPORT)"; exit $$failed

lint: $(VENV)/.plugins
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(VENV)/.ready
	rm -rf dist
	$(BIN)/python $(INSTALL) "twine>=6"
	$(BIN)/python tools/dist.py dist
	$(BIN)/python -m twine check --strict dist/*

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/data_plane.py
	$(BIN)/python benchmarks/step.py

$(VENV)/.ready: pyproject.toml plugins/rlcore-report/pyproject.toml
	@echo "== setting up $(VENV) with $$($(PYTHON) --version): about a minute, once =="
	$(PYTHON) -m venv $(VENV)
	@echo "== installing $(TORCH) =="
	$(BIN)/python $(INSTALL) "$(TORCH)"
	@echo "== installing rlcore, the requirements of its tests, and rlcore-report =="
	$(BIN)/python $(INSTALL) --editable ".[dev]" --editable plugins/rlcore-report
	@touch $@

$(VENV)/.plugins: $(VENV)/.ready $(PLUGINS:%=%/pyproject.toml)
	@echo "== installing plugins: $(notdir $(PLUGINS)) =="
	$(BIN)/python $(INSTALL) --no-build-isolation $(foreach plugin,$(PLUGINS),--editable "$(plugin)$(EXTRAS_$(notdir $(plugin)))")
	@touch $@

# An engine's virtual environment: torch, then the locked versions without resolution, then rlcore and the plugin.
.venv-%/.ready: plugins/rlcore-%/requirements-cpu.txt plugins/rlcore-%/pyproject.toml pyproject.toml
	@echo "== setting up .venv-$* for rlcore-$*: about two minutes, once =="
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(INSTALL) "$(TORCH)"
	.venv-$*/bin/python $(INSTALL) --no-deps --requirement $<
	.venv-$*/bin/python $(INSTALL) --no-deps --editable . --editable plugins/rlcore-$* --editable plugins/rlcore-fsdp
	@test ! -f plugins/rlcore-$*/tests/requirements.txt || \
		.venv-$*/bin/python $(INSTALL) --no-deps --requirement plugins/rlcore-$*/tests/requirements.txt
	@test ! -f plugins/rlcore-$*/tests/plain_cpu/enable.py || .venv-$*/bin/python plugins/rlcore-$*/tests/plain_cpu/enable.py
	@touch $@

clean:
	rm -rf $(VENV) $(ENGINES:%=.venv-%) outputs dist
