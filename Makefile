# `make` lists what there is. Python of the set-up and the gateway: `make run PYTHON=...`; of the models: MODELS_PYTHON=...
PYTHON ?= python3
BIN := .venv/bin
# What tests and tools write lies in the checkout, temporary files included.
SCRATCH := TMPDIR=$(CURDIR)/.cache/tmp
UV := UV_CACHE_DIR=.cache/uv $(BIN)/uv
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --no-header

.DEFAULT_GOAL := help
.PHONY: help setup run test test-full chaos system-packages lint type bench bench-tritons bench-load openapi docs lock

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv and .venv-triton with what is locked (run and test do it by themselves)
	@$(PYTHON) deploy/bootstrap.py

run: setup ## start a real Triton on triton_models/, or on MODELS=dir, and the gateway on http://127.0.0.1:8080
	@exec $(BIN)/triton-gateway serve --embedded $(if $(MODELS),--models "$(MODELS)")

test: setup ## run the suite against the real Triton and whatever else the machine has
	@$(SCRATCH) $(BIN)/python -m pytest -m "not full"

test-full: setup ## run the long forms too: large counts, chaos, heavy clients
	@$(SCRATCH) $(BIN)/python -m pytest

chaos: setup ## faults under load, hostile requests and memory, the long forms; writes docs/benchmarks/chaos.md
	@$(SCRATCH) $(BIN)/python -m tests.live.chaos

system-packages: ## install what the suite can use of the system (Debian, as root)
	@deploy/system-packages

lint: setup ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

type: setup ## mypy, strict, on app/
	@$(BIN)/mypy

bench: setup ## measure the gateway beside other servers, and write docs/benchmarks (at most ten minutes)
	@$(SCRATCH) $(BIN)/python -m benchmarks --write docs/benchmarks

bench-tritons: setup ## measure three Tritons of which one is killed, stopped, slow or added (about three minutes)
	@$(SCRATCH) $(BIN)/python -m benchmarks tritons --write docs/benchmarks

bench-load: setup ## measure the gateway far above its capacity, and write docs/benchmarks/load.md (eleven minutes)
	@$(SCRATCH) $(BIN)/python -m benchmarks load --write docs/benchmarks

openapi: setup ## write openapi.json anew from the running reference pipelines
	@$(SCRATCH) $(BIN)/python -m tests.live.openapi_document

docs: setup ## build the documentation site in site/, with search and without outside assets
	@$(BIN)/python -m deploy.documentation

lock: setup ## compile requirements/*.txt anew
	@$(COMPILE) --python-version 3.11 requirements/bootstrap.in -o requirements/bootstrap.txt
	@$(COMPILE) --python-version 3.11 requirements/audit.in -o requirements/audit.txt
	@$(COMPILE) --python-version 3.11 requirements/build.in -o requirements/build.txt
	@$(COMPILE) --python-version 3.11 requirements/checkov.in -o requirements/checkov.txt
	@$(COMPILE) --python-version 3.11 requirements/docs.in -o requirements/docs.txt
	@$(COMPILE) --python-version 3.11 requirements/kserve.in -o requirements/kserve.txt
	@$(COMPILE) --python-version 3.11 requirements/langchain.in -o requirements/langchain.txt
	@$(COMPILE) --python-version 3.11 requirements/litellm.in -o requirements/litellm.txt
	@$(COMPILE) --python-version 3.11 requirements/schemathesis.in -o requirements/schemathesis.txt
	@$(COMPILE) --python-version 3.11 --extra otel --extra redis pyproject.toml -o requirements/gateway.txt
	@$(COMPILE) --python-version 3.11 --group dev pyproject.toml -c requirements/gateway.txt -o requirements/dev.txt
	@$(COMPILE) --python-version 3.10 --no-deps requirements/triton.in -o requirements/triton.txt
