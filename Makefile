# make demo | test | test-models | lint | bench | conformance | clean: needs python3 >= 3.10 and nothing else.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PARTS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODELS := $(VENV)/.models
TITAN := $(VENV)/torchtitan

# Python keeps what it compiles: the tests start some hundred processes that import the package.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-models lint bench conformance clean

demo: $(READY)
	$(BIN)/python -m fsdp_compose demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/in_parts.py $(PARTS) -m "not cuda and not models and not torchtitan"
	$(MAKE) test-models

test-models: $(MODELS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/in_parts.py $(PARTS) -m models tests/libraries
	if PYTHONPATH=$(TITAN):tests $(BIN)/python -c "import titan_models" 2>/dev/null; \
	then OMP_NUM_THREADS=1 PYTHONPATH=$(TITAN) $(BIN)/python -m pytest -m torchtitan tests/libraries; \
	else echo "torchtitan cannot be imported here: its tests are left out"; fi

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(READY)
	set -e; for file in benchmarks/*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$file; done

# Every behaviour in the table, by FSDP1, FSDP2, DDP and this library; about ten minutes.
conformance: $(READY)
	$(BIN)/python benchmarks/conformance --save

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

# Models of other libraries, by the torch that is there. What torchtitan's Llama is made of goes into
# a folder of its own: the rest of torchtitan's dependencies would move what the other tests run on.
$(MODELS): $(READY)
	$(BIN)/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(VENV)/torch.txt
	$(BIN)/python -m pip install -c $(VENV)/torch.txt -e ".[models]"
	rm -rf $(TITAN)
	$(BIN)/python -m pip install --no-deps --target $(TITAN) \
	  torchtitan spmd-types tyro docstring-parser || rm -rf $(TITAN)
	touch $@
