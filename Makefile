# `make help` lists all targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
# Tests start hundreds of processes, which must not each compile every library, whatever the environment sets.
export PYTHONDONTWRITEBYTECODE :=
# Number of test processes, each with its own servers. A third one does not help on two threads of one core.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PROJECTS := shared/pyproject.toml services/coordinator/pyproject.toml services/worker/pyproject.toml services/local/pyproject.toml
# No byte-compilation at install time: modules are compiled when they are imported.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
SOURCES := shared/src services/coordinator/src services/coordinator/migrations services/worker/src services/local/src tests .ci

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: demo
demo: $(VENV)/.installed ## Train a federation of four clients on this machine, and show the result
	@$(BIN)/fedssl demo

.PHONY: test
test: $(VENV)/.installed-dev ## Run the test suite, on servers that it starts itself (FULL=1: the long tests too, with every method; FULL=1/16: a sixteenth of those)
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(FULL),--full $(if $(findstring /,$(FULL)),--part=$(FULL))) $(ARGS)

.PHONY: lint
lint: $(VENV)/.installed-dev ## Check style, types, import layers, Dockerfiles, the web page's scripts and the English
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy shared/src services/coordinator/src services/worker/src services/local/src .ci/plain_english
	@MYPYPATH=.ci/release $(BIN)/mypy .ci/release
	@$(BIN)/lint-imports
	@$(BIN)/hadolint services/*/Dockerfile deploy/*/Dockerfile
	@bash services/coordinator/web/check_style.sh
	@$(BIN)/python .ci/plain_english

.PHONY: format
format: $(VENV)/.installed-dev ## Format the code
	@$(BIN)/ruff check --fix --quiet $(SOURCES) || true
	@$(BIN)/ruff format $(SOURCES)
	@bash services/coordinator/web/check_style.sh --write

.PHONY: fuzz
fuzz: $(VENV)/.installed-dev ## Fuzz the API, its authorisation and every way in for files longer than the test suite does: about 20 minutes
	@FEDSSL_FUZZ_FACTOR=$${FEDSSL_FUZZ_FACTOR:-40} $(BIN)/python -m pytest tests/property/test_header_fuzz.py tests/property/test_openapi_fuzz.py \
	  tests/property/test_authorisation_walk.py tests/property/test_hostile_files.py --timeout 3600 $(ARGS)

.PHONY: explore
explore: $(VENV)/.installed-dev ## Explore the model of the state machines with larger numbers, and lead real runs through all of its steps: about 20 minutes
	@FEDSSL_FUZZ_FACTOR=40 $(BIN)/python -m pytest tests/model --full --timeout 3600 $(ARGS)

.PHONY: audit
audit: $(VENV)/.installed-dev ## Check every pinned version for known vulnerabilities (SERVICE=osv uses another database)
	@$(BIN)/python .ci/audit constraints.txt $(or $(SERVICE),pypi)

.PHONY: bench
bench: $(VENV)/.installed-dev ## Run the benchmarks, which measure ratios within one process
	@$(BIN)/python -m pytest tests/bench --override-ini=addopts= --override-ini='python_files=bench_*.py' -p no:cacheprovider $(ARGS)

.PHONY: gpu-test
gpu-test: $(VENV)/.installed-dev ## Run the tests that need a GPU
	@$(BIN)/python -m pytest tests/gpu --override-ini='addopts=--import-mode=importlib' $(ARGS)

.PHONY: golden
golden: $(VENV)/.installed-dev ## Rewrite the golden loss curves (ARGS="-k fedu" for some); tests/golden/README.md explains when
	@$(BIN)/python -m pytest tests/golden --full --rewrite-curves $(ARGS)

.PHONY: demonstration
demonstration: $(VENV)/.installed-dev ## Run SSD, FedRLC and FLESD on `fedssl up`, kill processes, and compare with their simulations
	@$(BIN)/python -m pytest tests/demonstration --override-ini='addopts=--import-mode=importlib' -s $(ARGS)

.PHONY: transfer
transfer: $(VENV)/.installed-dev ## Upload 2 GB over a line that breaks every few seconds, and download them again
	@PYTHONPATH=tests $(BIN)/python tests/bench/transfer_over_breaking_line.py $(ARGS)

.PHONY: load-test
load-test: $(VENV)/.installed-dev ## Load the coordinator with simulated workers (ARGS="--clients 1000 --rounds 2")
	@PYTHONPATH=tests $(BIN)/python tests/bench/load_simulated_workers.py $(ARGS)

PEERS := .artifacts/peers
SCRIPT ?= compare

.PHONY: bench-peers
bench-peers: $(VENV)/.installed-dev $(addsuffix /.installed,$(addprefix $(PEERS)/,flower nvflare)) ## Compare rounds with Flower and NVFlare (ARGS="--cases 2x0.4 10x45"; SCRIPT=kill_server or repeat)
	@PYTHONPATH=tests $(BIN)/python tests/bench/peers/$(SCRIPT).py --environments $(PEERS) $(ARGS)

.PHONY: bench-simulators
bench-simulators: $(VENV)/.installed-dev $(addsuffix /.installed,$(addprefix $(PEERS)/,pfl blazefl flower-simulation)) ## Compare simulations with pfl-research, BlazeFL and Flower (ARGS="--images cifar10.npz")
	@$(BIN)/python tests/bench/peers/compare_simulators.py --environments $(PEERS) $(ARGS)

.PHONY: bench-throughput
bench-throughput: $(VENV)/.installed-dev $(PEERS)/throughput/.installed ## Compare SimCLR's throughput with lightly and solo-learn (ARGS="--images cifar10.npz")
	@$(BIN)/python tests/bench/peers/compare_throughput.py --environment $(PEERS)/throughput $(ARGS)

# Each peer's environment. Those in undeclared/ run with these versions, and declare others: Python 3.12 or torch 1.9.1.
$(PEERS)/%/.installed: tests/bench/peers/%.txt
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@! test -e tests/bench/peers/undeclared/$*.txt || $(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --ignore-requires-python -r tests/bench/peers/undeclared/$*.txt
	@touch $@

.PHONY: pooler-test
pooler-test: $(VENV)/.installed-dev ## Test the coordinator behind PgBouncer, from PATH or PGBOUNCER=/path/to/pgbouncer
	@$(BIN)/python -m pytest tests/integration/coordinator/check_pgbouncer.py --override-ini='python_files=check_*.py' -p no:cacheprovider $(ARGS)

.PHONY: compose-test
compose-test: $(VENV)/.installed-dev ## Start the federation of docker-compose.yml on this machine's Docker engine, kill parts of it, and remove it
	@$(BIN)/python -m pytest tests/deploy --override-ini=addopts= --override-ini='python_files=check_*.py' --override-ini=timeout=3600 -p no:cacheprovider --exitfirst $(ARGS)

SEED ?= 7
FAULTS ?= 200
REPORT ?= faults.json
PATIENCE ?= 1
# The report repeats it.
fault: export FEDSSL_FAULT_COMMAND = make fault SEED=$(SEED) FAULTS=$(FAULTS) PATIENCE=$(PATIENCE)$(if $(ARGS), ARGS='$(ARGS)')
.PHONY: fault
fault: $(VENV)/.installed-dev ## Inject FAULTS=200 failures, drawn from SEED=7: kills, stops, lost connections; 20 minutes (PATIENCE=3: on a busy machine)
	@FEDSSL_FAULT_PATIENCE=$(PATIENCE) $(BIN)/python -m pytest tests/fault --timeout $$(awk 'BEGIN { print 300 * $(PATIENCE) }') --override-ini='python_files=fault_*.py' --override-ini=addopts='--strict-markers --import-mode=importlib' \
	  -p no:cacheprovider --fault-seed $(SEED) --faults $(FAULTS) --fault-report $(REPORT) $(ARGS)

# Chromium from the npm registry, installed without root, for machines that have none.
BROWSER_PACKAGES := axe-core@4.14.1 @sparticuz/chromium@153.0.0

.PHONY: browser-deps
browser-deps: $(VENV)/.installed-dev ## Install what browser-test needs: Playwright, axe, and Chromium if there is none (needs npm)
	@$(PIP) playwright
	@npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix .cache/npm $(BROWSER_PACKAGES)
	@command -v chromium chromium-browser google-chrome > /dev/null || \
	  node tests/browser/unpack_chromium.mjs .cache/npm/node_modules/@sparticuz/chromium/bin .cache/chromium

.PHONY: browser-test
browser-test: $(VENV)/.installed-dev ## Test the web page in Chromium; screenshots of every page go to .artifacts/browser
	@$(BIN)/python -m pytest tests/browser --override-ini=addopts= --import-mode=importlib -p no:cacheprovider $(ARGS)

.PHONY: pictures
pictures: $(VENV)/.installed-dev ## Retake the screenshots of docs/web.md, from a federation that trains
	@PYTHONPATH=tests $(BIN)/python tests/browser/take_pictures.py

.PHONY: recording
recording: $(VENV)/.installed-dev ## Record the README's moving picture of a run, with a federation that trains: 2 to 8 minutes
	@PYTHONPATH=tests $(BIN)/python tests/browser/record_page.py $(ARGS)

.PHONY: web-assets
web-assets: ## Compare the files in static/vendor with the versions in its VENDORED.txt (needs npm)
	@bash services/coordinator/web/check_vendored.sh

.PHONY: docs
docs: $(VENV)/.installed-dev ## Regenerate openapi.json and the Python reference (.artifacts/reference), and test the documents' examples
	@$(BIN)/fedssl-coordinator openapi > openapi.json
	@$(BIN)/python docs/python_reference.py .artifacts/reference
	@$(BIN)/python -m pytest tests/docs $(ARGS)

.PHONY: install
install: $(VENV)/.installed-dev ## Create the virtual environment in .venv, with all dependencies

.PHONY: lock
lock: $(VENV)/.installed-dev ## Write this environment's versions to constraints.txt, and the images' to deploy/requirements
	@$(BIN)/pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > constraints.txt
	@$(BIN)/python deploy/lock_requirements.py $(TORCH_INDEX)

.PHONY: lock-images
lock-images: $(VENV)/.installed-dev ## Write the images' requirements with hashes, from constraints.txt (TORCH_INDEX=URL: all CPU builds of torch)
	@$(BIN)/python deploy/lock_requirements.py $(TORCH_INDEX)

BASE_IMAGES := PYTHON=python:3.11-slim POSTGRES=postgres:16 REDIS=redis:7 CADDY=caddy:2 \
  PROMETHEUS=prom/prometheus:v3.5.0 GRAFANA=grafana/grafana:12.1.0 JAEGER=jaegertracing/jaeger:2.20.0
.PHONY: image-digests
image-digests: ## Write the base images' present digests to images.env, for `docker compose --env-file images.env` (needs their registry)
	@for pair in $(BASE_IMAGES); do \
	  digest=$$(docker buildx imagetools inspect "$${pair#*=}" --format '{{print .Manifest.Digest}}'); \
	  echo "FEDSSL_$${pair%%=*}_IMAGE=$${pair#*=}@$$digest"; \
	done > images.env.new
	@mv images.env.new images.env

.PHONY: sbom
sbom: ## Write the components of the built images (CycloneDX; VERSION=TAG) to .artifacts/sbom (needs Docker)
	@mkdir -p .artifacts/sbom
	@for image in api cli aggregator worker; do \
	  docker run --rm --network none --entrypoint cat "fedssl-$$image:$(or $(VERSION),$$(sed -n 's/^version = "\(.*\)"/\1/p' shared/pyproject.toml))" /opt/fedssl/sbom.cdx.json \
	    > ".artifacts/sbom/fedssl-$$image.cdx.json"; \
	done

RELEASE = $(BIN)/python .ci/release/release.py $(or $(VERSION),$(error VERSION is not set: make $@ VERSION=0.2.0)) \
  --sign "$(or $(SIGN),ssh)" $(if $(KEY),--key "$(KEY)") $(if $(IMAGES),--images "$(IMAGES)") $(if $(OUT),--out "$(OUT)") \
  $(if $(PLATFORMS),--platforms "$(PLATFORMS)") $(if $(BASE_IMAGE),--base-image "$(BASE_IMAGE)") \
  $(if $(BUILD_OPTIONS),--build-options='$(BUILD_OPTIONS)')
.PHONY: release
release: $(VENV)/.installed-dev ## Release VERSION=0.2.0, signed with KEY=~/.ssh/id_ed25519: commit, tag, and everything in dist/VERSION
	@$(RELEASE)

.PHONY: release-build
release-build: $(VENV)/.installed-dev ## Build the release of the tag that is checked out (VERSION=0.2.0 KEY=...), as CI does
	@$(RELEASE) --tagged

.PHONY: release-push
release-push: ## Push the images and the chart of dist/VERSION to REGISTRY=registry.example.org/ml (needs skopeo and helm)
	@cd "$(or $(OUT),dist/$(or $(VERSION),$(error VERSION is not set: make $@ VERSION=0.2.0)))"; \
	registry="$(or $(REGISTRY),$(error REGISTRY is not set: make $@ REGISTRY=registry.example.org/ml))"; \
	sha256sum --quiet --check --strict SHA256SUMS; \
	while read -r reference digest archive; do \
	  skopeo copy --all --preserve-digests "oci-archive:$$archive" "docker://$$registry/$$reference" < /dev/null; \
	done < images.txt; \
	helm push "fedssl-$(VERSION).tgz" "oci://$$registry/charts"

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
	@$(PIP) --no-build-isolation -e 'shared[train]' -e 'services/coordinator' -e 'services/worker' -e 'services/local'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	@$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"])')
	@touch $@
