# `make help` is the manual.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Tests start hundreds of processes: none is to compile every library anew, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
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
lint: $(VENV)/.installed-dev ## Check style (ruff), types (mypy), who imports whom (import-linter) and Dockerfiles (hadolint)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy shared/src services/coordinator/src services/worker/src
	@$(BIN)/lint-imports
	@$(BIN)/hadolint services/*/Dockerfile deploy/*/Dockerfile

.PHONY: format
format: $(VENV)/.installed-dev ## Format the code
	@$(BIN)/ruff check --fix --quiet $(SOURCES) || true
	@$(BIN)/ruff format $(SOURCES)

.PHONY: fuzz
fuzz: $(VENV)/.installed-dev ## Fuzz the artifact reader and the API for longer than the test suite does: about 10 minutes
	@FEDSSL_FUZZ_FACTOR=40 $(BIN)/python -m pytest tests/property/test_header_fuzz.py tests/property/test_openapi_fuzz.py --timeout 1800 $(ARGS)

.PHONY: audit
audit: $(VENV)/.installed-dev ## Ask for known vulnerabilities of every pinned version (SERVICE=osv asks another database)
	@$(BIN)/python .ci/audit constraints.txt $(or $(SERVICE),pypi)

.PHONY: bench
bench: $(VENV)/.installed-dev ## Measure, as ratios within one run
	@$(BIN)/python -m pytest tests/bench --override-ini=addopts= --override-ini='python_files=bench_*.py' -p no:cacheprovider $(ARGS)

.PHONY: gpu-test
gpu-test: $(VENV)/.installed-dev ## Run the tests that need a GPU
	@$(BIN)/python -m pytest tests/gpu --override-ini='addopts=--import-mode=importlib' $(ARGS)

.PHONY: golden
golden: $(VENV)/.installed-dev ## Rewrite the golden loss curves (ARGS="-k fedu" for some); tests/golden/README.md says when
	@$(BIN)/python -m pytest tests/golden --rewrite-curves $(ARGS)

.PHONY: demonstration
demonstration: $(VENV)/.installed-dev ## Run SSD, FedRLC and FLESD on `fedssl up`, with kills, against their simulations
	@$(BIN)/python -m pytest tests/demonstration --override-ini='addopts=--import-mode=importlib' -s $(ARGS)

.PHONY: transfer
transfer: $(VENV)/.installed-dev ## Send 2 GB over a line that breaks every few seconds, and fetch them again
	@PYTHONPATH=tests $(BIN)/python tests/bench/transfer_over_breaking_line.py $(ARGS)

.PHONY: load-test
load-test: $(VENV)/.installed-dev ## Put the coordinator under the load of simulated workers (ARGS="--clients 1000 --rounds 2")
	@PYTHONPATH=tests $(BIN)/python tests/bench/load_simulated_workers.py $(ARGS)

.PHONY: pooler-test
pooler-test: $(VENV)/.installed-dev ## Run the coordinator through PgBouncer, the one in PATH or PGBOUNCER=/path/to/pgbouncer
	@$(BIN)/python -m pytest tests/integration/coordinator/check_pgbouncer.py --override-ini='python_files=check_*.py' -p no:cacheprovider $(ARGS)

.PHONY: compose-test
compose-test: $(VENV)/.installed-dev ## Run the federation of docker-compose.yml on this machine's Docker engine, kill parts of it, and take it down
	@$(BIN)/python -m pytest tests/deploy --override-ini=addopts= --override-ini='python_files=check_compose.py' --override-ini=timeout=3600 -p no:cacheprovider --exitfirst $(ARGS)

SEED ?= 7
FAULTS ?= 200
REPORT ?= faults.json
PATIENCE ?= 1
.PHONY: fault
fault: $(VENV)/.installed-dev ## Kill, stop and cut off everything, FAULTS=200 times, drawn from SEED=7; a quarter of an hour (PATIENCE=3: on a busy machine)
	@FEDSSL_FAULT_PATIENCE=$(PATIENCE) $(BIN)/python -m pytest tests/fault --timeout $$(awk 'BEGIN { print 300 * $(PATIENCE) }') --override-ini='python_files=fault_*.py' --override-ini=addopts='--strict-markers --import-mode=importlib' \
	  -p no:cacheprovider --fault-seed $(SEED) --faults $(FAULTS) --fault-report $(REPORT) $(ARGS)

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

.PHONY: pictures
pictures: $(VENV)/.installed-dev ## Take the README's pictures of the web page anew, of a federation that really trains
	@PYTHONPATH=tests $(BIN)/python tests/browser/take_pictures.py

.PHONY: web-assets
web-assets: ## Fetch the versions that static/vendor/VENDORED.txt names, and say whether a file differs (needs npm)
	@bash services/coordinator/web/check_vendored.sh

.PHONY: docs
docs: $(VENV)/.installed-dev ## Regenerate openapi.json and the Python reference (.artifacts/reference), and check the documents' examples
	@$(BIN)/fedssl-coordinator openapi > openapi.json
	@$(BIN)/python docs/python_reference.py .artifacts/reference
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
