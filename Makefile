PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# As a path, not an import hook: a folder named ptlf beside a script (this clone, say) would go before the hook.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat

.PHONY: run bench-cpu test check test-gpu test-oldest faults reproduce docs install lint package clean help

help:      ## what there is to make
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */  /'

install: $(VENV)/.installed  ## .venv with the package and its pinned dependencies

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	$(PIP) -e '.[test]'
	touch $@

run: install  ## LUMP and PTLF on the embedded digits, compared, with a report, into runs/
	$(BIN)/ptlf sweep digits/simsiam/lump digits/simsiam/ptlf --out runs/$$(date +%Y%m%d-%H%M%S)

bench-cpu: install  ## a training step on this CPU beside plain PyTorch, in minutes
	$(BIN)/python benchmarks/cpu.py

lint: $(VENV)/.test-installed  ## style and types
	$(BIN)/ruff check ptlf tests reproduction benchmarks docs/*.py examples/*.py
	$(BIN)/ruff format --check ptlf tests reproduction benchmarks docs/*.py examples/*.py
	$(BIN)/mypy

test: lint  ## lint, types and all tests
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

check: lint  ## lint, types and the quick tests, in about a minute
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m "not slow"

test-gpu: $(VENV)/.test-installed  ## the tests that run on a GPU
	$(BIN)/pytest -m gpu

test-oldest: pyproject.toml  ## the quick tests with the oldest PyTorch that is supported, in .venv-oldest
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	sed -E '/^torch==/d; s/^numpy==.*/numpy==2.3.*/' constraints.txt > .venv-oldest/constraints.txt  # for its Triton's interpreter
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt 'torch==2.10.*' -e '.[test]'
	.venv-oldest/bin/pytest -n auto --maxprocesses 8 --dist worksteal -m "not slow"

reproduce: install  ## the paper's tables with ours, from the runs that are there: TABLE=all
	$(BIN)/python -m reproduction $(or $(TABLE),all) --show

docs: $(VENV)/.test-installed  ## the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

faults: $(VENV)/.test-installed  ## 20 runs killed at random moments, resumed, and compared bit for bit
	$(BIN)/python tests/faults.py --runs 20

package: $(VENV)/.test-installed  ## wheel and sdist, into dist/
	rm -rf build dist
	$(BIN)/python -m build
	rm -rf build

clean:  ## remove what `make` made
	rm -rf $(VENV) .venv-oldest site .pytest_cache .mypy_cache .ruff_cache *.egg-info build dist
