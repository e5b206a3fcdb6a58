# `make serve` and `make test` do their own set-up; the second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .stamps
ARGS ?=
NATIVE := $(wildcard penstock/kernels/cpu/*.cpp penstock/kernels/cpu/*.h)

.PHONY: serve test test-gpu lint format clean help

help:
	@echo "make serve [ARGS=...]  install if needed, fetch the default model, serve it on http://127.0.0.1:8000"
	@echo "make test  [ARGS=...]  install if needed and run the whole test suite"
	@echo "make test-gpu          the kernels against their definitions, on a CUDA device"
	@echo "make lint              ruff, mypy and the import contracts"
	@echo "make format            let ruff rewrite what it can"
	@echo "make clean             remove the virtual environment and build products"

$(STAMPS)/venv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/install: $(STAMPS)/venv pyproject.toml setup.py constraints.txt $(NATIVE)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(STAMPS)/dev: $(STAMPS)/install
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(STAMPS)/install
	$(BIN)/penstock serve $(ARGS)

test: $(STAMPS)/dev
	$(BIN)/python -m pytest $(ARGS)

test-gpu: $(STAMPS)/dev
	$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(STAMPS) build *.egg-info penstock/kernels/*.so
