# Two commands are enough: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TORCHREC := torchrec==1.8.0
OUT ?= runs/demo
PRESET ?= tiny
# Where wheels of CPU-only torch are found, if the default index has CUDA builds: make setup TORCH_INDEX_URL=...
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
SOURCES := pyproject.toml constraints.txt CMakeLists.txt Makefile $(wildcard kernels/*.cpp kernels/*.h kernels/*/*.cpp kernels/*/*.h)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check format bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv with everything pinned (done by the other targets)

# torch first and torchrec last, without dependencies: torchrec asks for fbgemm-gpu, whose files overwrite those of
# fbgemm-gpu-cpu and break it on a machine without CUDA.
$(STAMP): $(SOURCES)
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation --editable ".[cpu,spark,dev]"
	$(PIP) --no-deps $(TORCHREC)
	@touch $@

demo: $(STAMP) ## Run the whole pipeline on synthetic data and print what it found
	$(BIN)/recmill run --preset $(PRESET) --out $(OUT)

test: $(STAMP) ## Run the tests (under 12 minutes on 2 cores)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-all: $(STAMP) ## Run every test, the slow ones too
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest

check: $(STAMP) ## Lint, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run every benchmark in its quick form
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

clean: ## Remove everything that can be made again
	rm -rf $(VENV) build runs .mypy_cache .ruff_cache .pytest_cache
