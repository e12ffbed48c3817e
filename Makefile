# `make` lists the targets. PYTHON=... sets the Python of the setup and the gateway, MODELS_PYTHON=... that of the models.
PYTHON ?= python3
BIN := .venv/bin
# Tests and tools write only inside the checkout, including temporary files.
SCRATCH := TMPDIR='$(CURDIR)/.cache/tmp'
UV := UV_CACHE_DIR=.cache/uv $(BIN)/uv
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --no-header

# Python keeps compiled modules, whatever the caller's environment says: a test run starts hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup tools clean run test test-full chaos system-packages lint type bench bench-tritons bench-load openapi reference docs release vendor lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv and .venv-triton with the locked packages of what runs (run does this automatically)
	@$(PYTHON) deploy/bootstrap.py

tools: ## add the packages of the tests and of development to .venv (the targets that need them do this automatically)
	@$(PYTHON) deploy/bootstrap.py --tests

clean: ## remove everything that the other targets made in the checkout
	@rm -rf .venv .venv-triton .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis site dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

run: setup ## start a real Triton with triton_models/, or with MODELS=dir, and the gateway on http://127.0.0.1:8080
	@UV_CACHE_DIR='$(CURDIR)/.cache/uv' exec $(BIN)/triton-gateway serve --embedded $(if $(MODELS),--models "$(MODELS)")

test: tools ## run the suite with the real Triton and the optional programs of this machine
	@$(SCRATCH) $(BIN)/python -m pytest -m "not full" -n 3 --dist loadfile --no-loadscope-reorder

test-full: tools ## run the long tests too: large counts, chaos, heavy clients
	@$(SCRATCH) $(BIN)/python -m pytest

chaos: tools ## run the long tests of faults under load, hostile requests and memory; write docs/benchmarks/chaos.md
	@$(SCRATCH) $(BIN)/python -m tests.live.chaos.report

system-packages: ## install the system packages that the suite can use (Debian, as root)
	@deploy/system-packages

lint: tools ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

type: tools ## mypy, strict, on app/
	@$(BIN)/mypy

bench: tools ## compare the gateway with other servers, and write docs/benchmarks (about ten minutes)
	@$(SCRATCH) $(BIN)/python -m benchmarks --write docs/benchmarks

bench-tritons: tools ## measure three Tritons while one is killed, stopped, slow or added (about three minutes)
	@$(SCRATCH) $(BIN)/python -m benchmarks tritons --write docs/benchmarks

bench-load: tools ## measure the gateway far above its capacity, and write docs/benchmarks/load.md (eleven minutes)
	@$(SCRATCH) $(BIN)/python -m benchmarks load --write docs/benchmarks

openapi: tools ## generate openapi.json from the running reference pipelines
	@$(SCRATCH) $(BIN)/python -m tests.live.test_openapi

reference: tools ## generate the tables of docs/reference and the page of the command line
	@$(BIN)/python -m deploy.reference

docs: tools ## build the documentation, which the gateway serves at /docs/, in app/site
	@$(BIN)/python -m deploy.documentation

release: tools ## build the files of a release in dist/ from a tag: TAG=v0.2.0 URL=https://github.com/OWNER/NAME (RELEASING.md)
	@$(SCRATCH) $(BIN)/python -m deploy.release "$(TAG)" "$(URL)"

vendor: tools ## copy the console's JavaScript libraries from npm, as locked in requirements/console
	@$(BIN)/python -m deploy.console_libraries

lock: tools ## compile requirements/*.txt
	@$(COMPILE) --python-version 3.11 requirements/bootstrap.in -o requirements/bootstrap.txt
	@$(COMPILE) --python-version 3.11 requirements/aiperf.in -o requirements/aiperf.txt
	@$(COMPILE) --python-version 3.11 requirements/audit.in -o requirements/audit.txt
	@$(COMPILE) --python-version 3.11 requirements/build.in -o requirements/build.txt
	@$(COMPILE) --python-version 3.11 requirements/checkov.in -o requirements/checkov.txt
	@$(COMPILE) --python-version 3.11 requirements/docs.in -o requirements/docs.txt
	@$(COMPILE) --python-version 3.11 requirements/kserve.in -o requirements/kserve.txt
	@$(COMPILE) --python-version 3.11 requirements/langchain.in -o requirements/langchain.txt
	@$(COMPILE) --python-version 3.11 requirements/litellm.in -o requirements/litellm.txt
	@$(COMPILE) --python-version 3.11 requirements/pydantic-ai.in -o requirements/pydantic-ai.txt
	@$(COMPILE) --python-version 3.11 requirements/sbom.in -o requirements/sbom.txt
	@$(COMPILE) --python-version 3.11 requirements/schemathesis.in -o requirements/schemathesis.txt
	@$(COMPILE) --python-version 3.11 requirements/transformers.in -o requirements/transformers.txt
	@$(COMPILE) --python-version 3.11 --extra jsonschema-rs --extra otel --extra redis --extra tokenizers --overrides requirements/overrides.in pyproject.toml -o requirements/gateway.txt
	@$(COMPILE) --python-version 3.11 --group dev --overrides requirements/overrides.in pyproject.toml -c requirements/gateway.txt -o requirements/dev.txt
	@$(COMPILE) --python-version 3.10 --no-deps requirements/triton.in -o requirements/triton.txt
