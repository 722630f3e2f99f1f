# `make help` is the manual.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Test processes, each with servers of its own.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PROJECTS := shared/pyproject.toml services/coordinator/pyproject.toml services/worker/pyproject.toml
# No byte-compilation at install time: only what is imported is compiled, when it is.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
SOURCES := shared/src services/coordinator/src services/coordinator/migrations services/worker/src tests

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: demo
demo: $(VENV)/.installed ## Train a federation of four on this machine, and show what it learnt
	@$(BIN)/fedssl demo

.PHONY: test
test: $(VENV)/.installed-dev ## Run the whole test suite, on servers that it starts itself
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev ## Check style (ruff), types (mypy) and who imports whom (import-linter)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy shared/src services/coordinator/src services/worker/src
	@$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.installed-dev ## Format the code
	@$(BIN)/ruff check --fix --quiet $(SOURCES) || true
	@$(BIN)/ruff format $(SOURCES)

.PHONY: bench
bench: $(VENV)/.installed-dev ## Measure, as ratios within one run
	@$(BIN)/python -m pytest tests/bench --override-ini=addopts= --override-ini='python_files=bench_*.py' -p no:cacheprovider $(ARGS)

# Chromium without root, out of the npm registry, for machines that have none.
BROWSER_PACKAGES := axe-core@4.14.1 @sparticuz/chromium@153.0.0

.PHONY: browser-deps
browser-deps: $(VENV)/.installed-dev ## Fetch what browser-test needs: Playwright, axe, and Chromium where there is none (needs npm)
	@$(PIP) playwright
	@npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix .cache/npm $(BROWSER_PACKAGES)
	@command -v chromium chromium-browser google-chrome > /dev/null || \
	  node tests/browser/unpack_chromium.mjs .cache/npm/node_modules/@sparticuz/chromium/bin .cache/chromium

.PHONY: browser-test
browser-test: $(VENV)/.installed-dev ## Use the web page in Chromium; pictures of every page go to .artifacts/browser
	@$(BIN)/python -m pytest tests/browser --override-ini=addopts= --import-mode=importlib -p no:cacheprovider $(ARGS)

.PHONY: web-assets
web-assets: ## Fetch the versions that static/vendor/VENDORED.txt names, and say whether a file differs (needs npm)
	@bash services/coordinator/web/check_vendored.sh

.PHONY: docs
docs: $(VENV)/.installed-dev ## Regenerate openapi.json and check the documents' examples
	@$(BIN)/fedssl-coordinator openapi > openapi.json
	@$(BIN)/python -m pytest tests/docs $(ARGS)

.PHONY: install
install: $(VENV)/.installed-dev ## Make the virtual environment in .venv, with everything

.PHONY: lock
lock: $(VENV)/.installed-dev ## Write the versions of this environment to constraints.txt
	@$(BIN)/pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > constraints.txt

.PHONY: clean
clean: ## Remove the virtual environment, caches and the demo's folder
	@rm -rf $(VENV) .fedssl .fedssl-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks .artifacts
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedssl needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/pip constraints.txt $(PROJECTS)
	@echo "Installing fedssl into $(VENV) (the first time this downloads torch) ..."
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e 'shared[train,local]' -e 'services/coordinator' -e 'services/worker'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	@$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"])')
	@touch $@
