# Everything happens in a virtual environment in .venv; delete it to start afresh.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_OPTIONS ?=
INSTALL := $(BIN)/pip install --quiet $(PIP_OPTIONS)

# Tests start hundreds of interpreters: without bytecode each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-thorough gpu fuzz check format docs check-docs pictures clean

demo: $(VENV)/installed  ## the main job on a real recording that ships with the package
	$(BIN)/thence demo

test: $(VENV)/installed-dev  ## the tests
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

test-fast: $(VENV)/installed-dev  ## without those that run a slow, obvious implementation
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m 'not gpu and not slow_oracle'

MINUTES ?= 60
PROCESSES ?= $(shell getconf _NPROCESSORS_ONLN)
fuzz: $(VENV)/installed-dev  ## mutated inputs of every format for MINUTES on all cores (or PROCESSES=), other ones for every SEED; keeps what reaches new code and what fails
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) --processes $(PROCESSES) --seed $(or $(SEED),$(shell date +%s)) --keep fuzz-failures --corpus fuzz-corpus

test-thorough: $(VENV)/installed-dev  ## with four times as many examples of each property
	THENCE_THOROUGH=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

OUT ?= gpu-parts
gpu:  ## the parts of the proof on GPUs, with the Python that has torch and jax; without PARTS= it lists them (PARTS=all, or names; ONLY=record or check)
	$(PYTHON) tests/gpu/run.py $(PARTS) --out $(OUT) $(if $(ONLY),--only $(ONLY))

check: $(VENV)/installed-dev  ## linter, formatter and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev  ## formats the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-docs  ## the documentation as a site, in site/; needs no network once its packages are there
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html is written"

check-docs: $(VENV)/installed-dev  ## runs every command of README, docs and --help, and compares what they show
	$(BIN)/python docs/check_commands.py

pictures: $(VENV)/installed-dev  ## draws the pictures of README and docs anew; needs Chromium
	$(BIN)/python docs/make_picture.py

clean:
	rm -rf $(VENV) build dist site

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/installed: $(BIN)/python pyproject.toml
	$(INSTALL) --editable .
	touch $@

$(VENV)/installed-docs: $(VENV)/installed pyproject.toml
	$(INSTALL) --group docs
	touch $@

$(VENV)/installed-dev: $(VENV)/installed pyproject.toml
	$(INSTALL) --group dev
	touch $@
