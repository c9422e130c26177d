# make demo | test | lint | bench | clean: needs python3 >= 3.10 and nothing else.

PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/python -m fsdp_compose demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not cuda"

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(READY)
	set -e; for file in benchmarks/*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$file; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch that the package supports and that is there already is kept; the pin is for the others.
KEEP := import torch; assert [int(n) for n in torch.__version__.split(".")[:2]] >= [2, 11]

$(READY): pyproject.toml
	$(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || $(BIN)/python -m ensurepip >/dev/null 2>&1 \
	  || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) \
	  || { echo "$(PYTHON) has no working venv module; on Debian: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -c '$(KEEP)' 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[dev,demo,safetensors]"
	touch $@
