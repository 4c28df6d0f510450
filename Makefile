# `make` lists the targets.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
WORKERS ?= 2
GPU_WORKERS ?= 8

VENV  := .venv
READY := $(VENV)/.ready
# Those with the longest files first, so that no worker waits for another in the end.
TIERS := $(wildcard tests/compile tests/docs tests/emulator tests/browser tests/distributed tests/compat tests/unit tests/package)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint gpu-test bench bench-gpu learn notebooks site docs package clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv; a torch that is already there is used, otherwise one is installed

# If python3 belongs to a virtual environment, a venv made by it does not see that environment's packages: a .pth file shows them.
# The torch that is found or installed is held by a constraint, so that no dependency can replace it.
$(READY): pyproject.toml
	@if found=$$($(PYTHON) -c "import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))" 2>/dev/null); then \
	  echo "using the torch in $$found"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	  $(VENV)/bin/python -c "import torch" 2>/dev/null || \
	    echo "$$found" > "$$($(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/surrounding.pth"; \
	else \
	  $(PYTHON) -m venv $(VENV); \
	fi
	@$(VENV)/bin/python -c "import torch" 2>/dev/null || $(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	@$(VENV)/bin/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[dev]"
	@touch $@

demo: $(READY) ## strobe against standard attention, on a GPU if there is one
	$(VENV)/bin/strobe demo

lint: $(READY) ## ruff, clang-format and mypy
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	PATH="$(VENV)/bin:$$PATH" clang-format --dry-run --Werror $$(git ls-files "*.cuh" "*.cu" "*.h")
	$(VENV)/bin/python -m mypy

# -rfEs: what failed, and what was skipped and why, in the last lines. loadfile: the tests of a file share compiled kernels
# and fixtures, which two workers would both make; files begin in the order of TIERS, not those with the most tests first.
PYTEST := $(VENV)/bin/python -m pytest $(TIERS) -q -rfEs -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15

test: lint ## lint, types and the tests for every day that need no GPU, in about 10 minutes on two cores
	$(PYTEST) -m "not thorough"

test-all: lint ## lint, types and every test that needs no GPU, in about 20 minutes on two cores
	$(PYTEST)

# Most of the time goes into compiling. So files run side by side if the python3 at hand has pytest-xdist. -v: a run that is cut off
# has named what failed.
GPU_PYTEST = PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -v -rfEs --durations=15

gpu-test: ## the tests in tests/gpu, with the python3 at hand; installs nothing
	$(GPU_PYTEST) -m "not alone" $$($(PYTHON) -c "import xdist" 2>/dev/null && echo "-n $(GPU_WORKERS) --dist loadfile")
	$(GPU_PYTEST) -m alone

bench: $(READY) ## the quick suite on this machine; the report is report/index.html
	$(VENV)/bin/strobe bench --suite quick --out report/quick.json --report report

SUITES ?= grid36 sweep overhead
METHOD ?= turns
bench-gpu: ## SUITES (grid36 sweep overhead) by METHOD (turns) with the python3 at hand, into OUT (report); installs nothing
	for suite in $(SUITES); do PYTHONPATH=src $(PYTHON) -m strobe bench --suite $$suite --method $(METHOD) \
	  --out $(or $(OUT),report)/$$suite-$(METHOD).json || exit 1; done

learn: $(READY) ## put the explaining page and the notebooks into build/learn and say where they are
	@$(VENV)/bin/python notebooks/build.py build/learn
	@$(VENV)/bin/strobe explain-page -o build/learn/page.html
	@echo "open $(CURDIR)/build/learn/page.html in a browser, the .ipynb files in Jupyter or on Colab,"
	@echo "or run a notebook as it is: $(VENV)/bin/python notebooks/01_cuda_starter.py"

notebooks: $(READY) ## run both notebooks and save them with their outputs
	$(VENV)/bin/python notebooks/build.py

site: $(READY) ## the documents as a web site, in build/site
	$(VENV)/bin/python -m sphinx -q -W --keep-going docs build/site
	@echo "open $(CURDIR)/build/site/index.html in a browser"

docs: $(READY) ## bring the generated tables and figures of the documents up to date
	$(VENV)/bin/python -m benchmarks.pages --write

package: $(READY) ## the sdist and the wheel, in dist
	$(VENV)/bin/python -m build --no-isolation --outdir dist

clean: ## remove caches (not .venv)
	rm -rf .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
