PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test install lint clean help

help:      ## what there is to make
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */  /'

install: $(VENV)/.installed  ## .venv with the package and its pinned dependencies

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	$(PIP) -e '.[test]'
	touch $@

run: install  ## the default recipe on the embedded digits, into runs/
	$(BIN)/ptlf train --out runs/$$(date +%Y%m%d-%H%M%S)

lint: $(VENV)/.test-installed  ## style and types
	$(BIN)/ruff check ptlf tests
	$(BIN)/ruff format --check ptlf tests
	$(BIN)/mypy

test: lint  ## lint, types and tests
	$(BIN)/pytest

clean:  ## remove what `make` made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
