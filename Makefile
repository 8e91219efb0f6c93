# Two commands: `make demo` and `make test`. Each sets up what it needs in .venv by itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PART   ?= tests ckda
ARGS   ?=

.PHONY: demo test lint docs results clean

demo: $(STAMP)
	$(BIN)/ckda demo $(ARGS)

# All of it, or one part: make test PART=tests/ops
test: lint
	$(BIN)/python -m pytest $(PART) $(ARGS)

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
