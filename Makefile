# Two commands: `make demo` and `make test`; while editing, `make quick`. Each sets up what it needs in .venv by itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PART   ?= tests ckda
ARGS   ?=
# As many processes as cores; each test runs on one thread
CORES  ?= auto

.PHONY: demo test quick lint docs results clean

demo: $(STAMP)
	$(BIN)/ckda demo $(ARGS)

# All of it, or one part: make test PART=tests/ops
test: lint
	$(BIN)/python -m pytest -n $(CORES) --durations=15 $(PART) $(ARGS)

# What one wants while editing, in under a minute: lint, types, and tests of every room that take no second
quick: lint
	$(BIN)/python -m pytest -n $(CORES) -m "not slow and not gpu" $(QUICK) $(ARGS)
QUICK := tests/test_imports_run_one_way.py tests/test_docs.py tests/test_readme.py tests/test_cli.py tests/test_transition.py \
	tests/ops/test_interface.py tests/ops/test_naive.py tests/layers/test_complex_kda.py tests/train tests/experiments/tracking \
	tests/experiments/audio/test_task.py tests/models/test_ladder.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m ckda.docs

# Every figure of results/ again, from its records, and the index
results: $(STAMP)
	$(BIN)/python -m ckda.results

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache
