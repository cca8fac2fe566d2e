# Everything runs in a virtual environment of its own, made on first use:  make demo | test | check | test-gpu
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a test process: the small tensors of the tests only lose time to more.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: help setup demo test test-gpu check lint types format clean

help:
	@echo "make demo      set up, then caption the bundled pictures with the embedded model, offline"
	@echo "make test      set up, then run all tests"
	@echo "make check     formatting, lint and type checks"
	@echo "make test-gpu  the tests that need a CUDA device, with this machine's own python3 and torch"
	@echo "make clean     remove the virtual environment and what was built"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; say which with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "error: the venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (torch is the large part) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@HF_HUB_OFFLINE=1 $(BIN)/vlm caption examples/pictures

# -P keeps the repository root off sys.path; see the comment in tests/conftest.py.
test: $(READY)
	$(TEST_ENV) $(BIN)/python -P -m pytest -n 2 $(TEST_ARGS)

test-gpu:
	TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(PYTHON) -P -m pytest -m gpu $(TEST_ARGS)

check: lint types

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not follow package-dir: check the package as it installs.
types: $(READY)
	@rm -rf build
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target build/types .
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p vlm

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
