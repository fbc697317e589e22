# Start with `make demo` and `make test`: both set up what they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OUT ?= runs/demo
BENCHMARKS := recd flexshard fae fae_order pss intune together serving dedup_kernel generate profile_scale
PRESET ?= demo
MINUTES ?= 120
RUNS ?= 100000
# requirements/*.txt list every package with the hashes of its files (make lock), so nothing else is resolved or installed.
PIP := -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation
LOCKED := $(PIP) --require-hashes --requirement requirements
# TORCH_INDEX_URL: index of CPU-only builds of torch, if the default index has CUDA builds.
# TORCH_BUILD: any other build of the same version, whose hash is not listed, e.g. TORCH_BUILD=torch==2.13.0+cu126.
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
NO_CPU_BUILD := no index offers the locked CPU build of torch: installing the CUDA build, gigabytes (README.md: TORCH_INDEX_URL)
ifdef TORCH_BUILD
install_torch = $(1)/bin/python -m pip install --quiet $(TORCH_INDEX) $(TORCH_BUILD)
else
install_torch = $(1)/bin/python $(LOCKED)/torch-cpu.txt $(TORCH_INDEX) 2>$(1)/torch.log || { echo "$(NO_CPU_BUILD)" && $(1)/bin/python $(LOCKED)/torch-cuda.txt; }
endif
# Linters of images and manifests have their own environment: checkov needs older versions of shared packages.
LINT := .venv-lint
LINT_STAMP := $(LINT)/.ready
# KServe's model server has its own, too: it pins pandas and psutil below what the rest uses.
SERVER := .venv-server
SERVER_STAMP := $(SERVER)/.ready
KUBECTL ?= kubectl
KIND_CLUSTER ?= recmill
OVERLAYS := $(wildcard manifests/overlays/*)
IMAGE_TAG ?= $(shell images/tag.sh)
SOURCES := pyproject.toml $(wildcard requirements/*.txt) CMakeLists.txt Makefile $(wildcard kernels/*.cpp kernels/*.h kernels/*/*.cpp kernels/*/*.h kernels/third_party/zstd/*/*)

.DEFAULT_GOAL := help
.PHONY: help setup setup-server lock sbom demo test test-all test-sanitizers fuzz test-faults soak check check-deployment format bench results results-quick images kind-up kind-down test-cluster clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv with pinned versions (the other targets do this first) and name its torch build
	@$(BIN)/python -c "from recmill.cli.doctor import check_torch as check; print('torch', found := check().found); 'CUDA' in found and print('for a small CPU build see README.md')"

# build.txt first: the few packages without a wheel need it.
$(STAMP): $(SOURCES)
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(LOCKED)/build.txt
	@$(call install_torch,$(VENV))
	$(BIN)/python $(LOCKED)/setup.txt
	$(BIN)/python $(PIP) --editable .
	@touch $@

setup-server: $(SERVER_STAMP) ## Create .venv-server, the environment of recmill serve

$(SERVER_STAMP): $(SOURCES)
	@test -x $(SERVER)/bin/python || $(PYTHON) -m venv $(SERVER)
	$(SERVER)/bin/python $(LOCKED)/build.txt
	@$(call install_torch,$(SERVER))
	$(SERVER)/bin/python $(LOCKED)/server.txt
	$(SERVER)/bin/python $(LOCKED)/kernels.txt
	$(SERVER)/bin/python $(PIP) --config-settings=build-dir=build/server --editable .
	@touch $@

lock: $(LINT_STAMP) ## Write requirements/*.txt, versions with hashes, from pyproject.toml and constraints.txt; after a change of torch with TORCH_WHEEL=FILE
	$(LINT)/bin/python requirements/lock.py $(if $(TORCH_WHEEL),--torch-wheel $(TORCH_WHEEL))

sbom: $(STAMP) ## Write build/sbom: what this environment and the images (docker or buildah) consist of, as CycloneDX
	@mkdir -p build/sbom
	$(BIN)/python requirements/sbom.py > build/sbom/environment.cdx.json
	@if command -v docker >/dev/null || command -v buildah >/dev/null; then images/build.sh --tag $(IMAGE_TAG); \
	else echo "no docker or buildah: only the environment's is written"; fi

demo: $(STAMP) ## Train baseline, all switches and a compressed variant on synthetic traffic, and show what each gained
	$(BIN)/recmill run --preset $(PRESET) --nproc 2 --with-sharing --out $(OUT)

test: $(STAMP) ## Run the tests (under 12 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --ignore tests/cluster

test-all: $(STAMP) ## Run every test, including the slow ones
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest --ignore tests/cluster

test-sanitizers: $(STAMP) ## Run the tests of the C++ kernels, built with AddressSanitizer and UndefinedBehaviorSanitizer
	tests/fuzz/sanitized.sh $(BIN)/python -m pytest tests/kernels -p no:cacheprovider

fuzz: $(STAMP) ## Fuzz the C++ kernels with hostile pages, offsets and windows; make fuzz RUNS=1500000
	$(BIN)/python tests/fuzz/run.py --runs $(RUNS)

test-faults: $(STAMP) ## Disturb every command: kills, full disks, lost networks, failing stores (short form; as root)
	$(BIN)/python -m tests.faults.campaign --short --json build/faults.json

soak: $(STAMP) ## Train for MINUTES (120) under changing CPU quotas, memory limits and workers; every row read once
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) --json build/soak.json

check: $(STAMP) ## Lint, types, import rules and licences
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python requirements/licences.py
	@$(MAKE) --no-print-directory check-deployment

check-deployment: $(LINT_STAMP) ## Lint images, manifests and scripts
	$(LINT)/bin/python requirements/licences.py --tools
	$(LINT)/bin/hadolint images/Dockerfile tests/cluster/*/Dockerfile
	$(LINT)/bin/shellcheck images/*.sh manifests/*.sh tests/cluster/*.sh tests/cluster/*/*.sh tests/fuzz/*.sh .ci/run
	$(LINT)/bin/yamllint .
	@mkdir -p build/manifests
	@for overlay in $(OVERLAYS); do \
	  rendered=build/manifests/$$(basename $$overlay).yaml; echo "checking $$overlay"; \
	  $(KUBECTL) kustomize $$overlay > $$rendered || exit 1; \
	  $(LINT)/bin/kubernetes-validate --strict --quiet $$rendered || exit 1; \
	  $(LINT)/bin/checkov --quiet --compact --skip-download --framework kubernetes --file $$rendered || exit 1; \
	done
	$(LINT)/bin/checkov --quiet --compact --skip-download --framework dockerfile --directory images

$(LINT_STAMP): requirements/lint.txt
	@test -x $(LINT)/bin/python || $(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python $(LOCKED)/lint.txt
	@touch $@

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run every benchmark in its quick form
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py --quick || exit 1; done

results: $(STAMP) ## Run the full benchmarks behind docs/results.md and rewrite its table (hours; nothing else may run meanwhile)
	$(BIN)/python benchmarks/results.py --run

results-quick: $(STAMP) ## The same in quick forms, for development: prints the table, changes no page
	$(BIN)/python benchmarks/results.py --run --quick

images: ## Build the images with docker or buildah; make images IMAGE_TAG=...
	images/build.sh --tag $(IMAGE_TAG)

kind-up: $(STAMP) ## Start a kind cluster with Kubeflow Pipelines, Trainer, MLflow and the images
	KIND_CLUSTER=$(KIND_CLUSTER) KUBECTL=$(KUBECTL) IMAGE_TAG=$(IMAGE_TAG) manifests/kind-up.sh

kind-down: ## Delete the kind cluster and everything in it
	kind delete cluster --name $(KIND_CLUSTER)

test-cluster: $(STAMP) ## Run the steps as real pods on KUBECONFIG's cluster, or on RECMILL_CLUSTER_KIT's (under 20 minutes)
	tests/cluster/with-cluster.sh $(BIN)/python -m pytest tests/cluster --timeout 2400 -o timeout_func_only=true  # building images is no test

clean: ## Remove everything that can be rebuilt
	rm -rf $(VENV) $(LINT) $(SERVER) build runs .mypy_cache .ruff_cache .pytest_cache
