# Start with `make demo` and `make test`: both set up what they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OUT ?= runs/demo
BENCHMARKS := recd flexshard fae fae_order pss intune together dedup_kernel generate profile_scale
PRESET ?= demo
MINUTES ?= 120
# Index of CPU-only builds of torch, if the default index has CUDA builds: make setup TORCH_INDEX_URL=...
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
# Linters of images and manifests have their own environment: checkov needs older versions of shared packages.
LINT := .venv-lint
LINT_STAMP := $(LINT)/.ready
# KServe's model server has its own, too: it pins pandas and psutil below what the rest uses.
SERVER := .venv-server
SERVER_STAMP := $(SERVER)/.ready
SERVER_REQUIREMENTS := recmill/serving/server/requirements.txt
KUBECTL ?= kubectl
KIND_CLUSTER ?= recmill
OVERLAYS := $(wildcard manifests/overlays/*)
IMAGE_TAG ?= $(shell images/tag.sh)
SOURCES := pyproject.toml constraints.txt CMakeLists.txt Makefile $(wildcard kernels/*.cpp kernels/*.h kernels/*/*.cpp kernels/*/*.h kernels/third_party/zstd/*/*)

.DEFAULT_GOAL := help
.PHONY: help setup setup-server demo test test-all test-faults soak check check-deployment format bench results results-quick images kind-up kind-down test-cluster clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv with pinned versions (the other targets do this first) and name its torch build
	@$(BIN)/python -c "from recmill.cli.doctor import check_torch as check; print('torch', found := check().found); 'CUDA' in found and print('for a small CPU build see README.md')"

# torchrec last and without dependencies: it requires fbgemm-gpu, whose files overwrite those of fbgemm-gpu-cpu and break
# it on a machine without CUDA.
$(STAMP): $(SOURCES)
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) scikit-build-core nanobind cmake ninja wheel  # wheel: iopath is built from source
	$(PIP) --no-build-isolation --editable ".[cpu,spark,dev]"
	$(PIP) --no-deps torchrec
	@touch $@

setup-server: $(SERVER_STAMP) ## Create .venv-server, the environment of recmill serve

$(SERVER_STAMP): $(SERVER_REQUIREMENTS) $(SOURCES)
	@test -x $(SERVER)/bin/python || $(PYTHON) -m venv $(SERVER)
	$(SERVER)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) --requirement $(SERVER_REQUIREMENTS)
	$(SERVER)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt scikit-build-core nanobind cmake ninja
	$(SERVER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --config-settings=build-dir=build/server --editable .
	@touch $@

demo: $(STAMP) ## Train baseline, all switches and a compressed variant on synthetic traffic, and show what each gained
	$(BIN)/recmill run --preset $(PRESET) --nproc 2 --with-sharing --out $(OUT)

test: $(STAMP) ## Run the tests (under 12 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --ignore tests/cluster

test-all: $(STAMP) ## Run every test, including the slow ones
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest --ignore tests/cluster

test-faults: $(STAMP) ## Disturb every command: kills, full disks, lost networks, failing stores (short form; as root)
	$(BIN)/python -m tests.faults.campaign --short --json build/faults.json

soak: $(STAMP) ## Train for MINUTES (120) under changing CPU quotas, memory limits and workers; every row read once
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) --json build/soak.json

check: $(STAMP) ## Lint, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory check-deployment

check-deployment: $(LINT_STAMP) ## Lint images, manifests and scripts
	$(LINT)/bin/hadolint images/Dockerfile tests/cluster/*/Dockerfile
	$(LINT)/bin/shellcheck images/*.sh manifests/*.sh tests/cluster/*.sh tests/cluster/*/*.sh .ci/run
	$(LINT)/bin/yamllint .
	@mkdir -p build/manifests
	@for overlay in $(OVERLAYS); do \
	  rendered=build/manifests/$$(basename $$overlay).yaml; echo "checking $$overlay"; \
	  $(KUBECTL) kustomize $$overlay > $$rendered || exit 1; \
	  $(LINT)/bin/kubernetes-validate --strict --quiet $$rendered || exit 1; \
	  $(LINT)/bin/checkov --quiet --compact --skip-download --framework kubernetes --file $$rendered || exit 1; \
	done
	$(LINT)/bin/checkov --quiet --compact --skip-download --framework dockerfile --directory images

$(LINT_STAMP): lint-requirements.txt
	@test -x $(LINT)/bin/python || $(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install --quiet --disable-pip-version-check --requirement lint-requirements.txt
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
	tests/cluster/with-cluster.sh $(BIN)/python -m pytest tests/cluster --timeout 2400

clean: ## Remove everything that can be rebuilt
	rm -rf $(VENV) $(LINT) $(SERVER) build runs .mypy_cache .ruff_cache .pytest_cache
