# make demo | test | test-models | lint | docs | bench | conformance | faults | fuzz | mutants |
# wheel | clean: needs python3 >= 3.10 and nothing else.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PARTS ?= 3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODELS := $(VENV)/.models
TITAN := $(VENV)/torchtitan

# Python keeps what it compiles: the tests start some hundred processes that import the package.
export PYTHONDONTWRITEBYTECODE :=

RECIPES := $(VENV)/recipes
DOCS := $(VENV)/.docs
EMPTY := build/empty

.PHONY: demo test test-models test-libraries test-recipes test-torchtitan lint docs bench conformance faults fuzz mutants wheel clean

demo: $(READY)
	$(BIN)/python -m fsdp_compose demo

# What comes after the suite leaves a core idle, each by itself; what they need is installed before.
SIDE_BY_SIDE := -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/in_parts.py $(PARTS) -m "not cuda and not models and not torchtitan"
	$(MAKE) $(MODELS) $(DOCS)
	$(MAKE) $(SIDE_BY_SIDE) test-models docs

test-models: test-libraries test-recipes test-torchtitan

test-libraries: $(MODELS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/in_parts.py $(PARTS) -m models tests/libraries \
	  --ignore=tests/libraries/test_recipes.py --ignore=tests/libraries/test_torchao.py

test-recipes: $(MODELS)
	OMP_NUM_THREADS=1 PYTHONPATH=$(RECIPES) $(BIN)/python -m pytest -m models \
	  tests/libraries/test_recipes.py tests/libraries/test_torchao.py

test-torchtitan: $(MODELS)
	if PYTHONPATH=$(TITAN):tests $(BIN)/python -c "import titan_models" 2>/dev/null; \
	then OMP_NUM_THREADS=1 PYTHONPATH=$(TITAN) $(BIN)/python -m pytest -m torchtitan tests/libraries; \
	else echo "torchtitan cannot be imported here: its tests are left out"; fi

# The site, with warnings as errors. The blocks of its pages run in the test suite.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet --strict
	@echo "build/site/index.html"

# The sdist, and the wheel that is built from it alone. The wheel with its declared dependencies in
# an empty environment runs the README's example.
wheel: $(READY)
	rm -rf build dist && mkdir -p $(EMPTY)
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('dist')" >/dev/null
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/*.tar.gz
	$(BIN)/python -m venv $(EMPTY)/venv
	$(EMPTY)/venv/bin/python -m pip install --quiet "$(TORCH)" dist/*.whl
	$(BIN)/python tests/docs_pages.py > $(EMPTY)/train.py
	cd $(EMPTY) && venv/bin/fsdp-compose run --nproc 2 train.py

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# The tables, with machine, versions, command and spread; best on an idle machine.
bench: $(READY)
	set -e; for run in padding.py host_overhead.py "host_overhead.py --parts instructions" \
	    optimizer_step.py scale.py codecs.py backward_memory.py \
	    step_time.py "step_time.py --ranks 4" "step_time.py --microbatches 4" \
	    "step_time.py --ranks 4 --microbatches 4" \
	    "same_bits.py --ranks 2" "same_bits.py --ranks 4"; do \
	  OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$run --save; done

# Every behaviour in the table, by FSDP1, FSDP2, DDP and this library; about ten minutes.
conformance: $(READY)
	$(BIN)/python benchmarks/conformance --save

# Ranks killed, stopped, out of memory and so on under torch's elastic agent; about ten minutes.
faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults.py --save

# Random programs on 1 to 16 simulated ranks; hours. It goes on where build/fuzz.jsonl ends.
FUZZ ?= 0-100000
fuzz: $(READY)
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --seeds $(FUZZ) --workers 2 --log build/fuzz.jsonl
	$(BIN)/python tests/fuzz_search.py build/fuzz.jsonl

# Small changes of the engine, each against the tests that reach it; hours for all of them. A further
# run goes on where the last one was ended.
mutants: $(READY)
	OMP_NUM_THREADS=1 nice -n 19 $(BIN)/python benchmarks/mutants.py --save

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A torch that the package supports and that is there already is kept; the pin is for the others.
KEEP := import torch; assert [int(n) for n in torch.__version__.split(".")[:2]] >= [2, 11]

$(READY): pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || $(BIN)/python -m ensurepip >/dev/null 2>&1 \
	  || $(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) \
	  || { echo "$(PYTHON) has no working venv module; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "installing torch and what the tests and the demo need into $(VENV)"
	@$(BIN)/python -c '$(KEEP)' 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	@$(BIN)/python -m pip install --quiet -e ".[dev,demo,safetensors]"
	@touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

# Models of other libraries, by the torch that is there. What torchtitan's Llama is made of goes into
# a folder of its own: the rest of torchtitan's dependencies would move what the other tests run on.
# So do the libraries of docs/recipes.md, of which those that install are tried.
$(MODELS): $(READY)
	$(BIN)/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(VENV)/torch.txt
	$(BIN)/python -m pip install -c $(VENV)/torch.txt -e ".[models]"
	rm -rf $(RECIPES)
	$(BIN)/python -m pip install --no-deps --target $(RECIPES) ema-pytorch torchao diffusers bitsandbytes requests \
	  urllib3 certifi charset-normalizer idna \
	  lightning lightning-utilities torchmetrics || rm -rf $(RECIPES)
	rm -rf $(TITAN)
	$(BIN)/python -m pip install --no-deps --target $(TITAN) \
	  torchtitan spmd-types tyro docstring-parser || rm -rf $(TITAN)
	touch $@
