# make serve: install and serve the default model; make test: the test suite. `make help` lists the rest.
# Stamps in .make/ remember what is done, so that a second run needs no network.

PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= smollm2
PORT ?= 8000
ARGS ?=
PART ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq
INSTALL := $(PIP) --no-build-isolation -e
SOURCES := $(shell find csrc -type f -not -name '*.o' 2>/dev/null)
CPP := $(filter %.cpp %.cc %.h %.hpp,$(SOURCES))

.DELETE_ON_ERROR:
.PHONY: help setup dev serve demo test test-full check format clean

help:
	@echo 'make serve      install, then serve MODEL=$(MODEL) on 127.0.0.1:$(PORT)   (ARGS="--threads 4 ...")'
	@echo 'make demo       start a server, ask one question, show the answer and its tokens/s, end'
	@echo 'make test       the test suite with a fresh sample of each large matrix   (ARGS="tests/unit -k name")'
	@echo 'make test-full  every matrix whole; resumes where it stopped              (PART=tests/engine)'
	@echo 'make check      ruff, mypy, clang-format          make format   rewrite in that form'
	@echo 'make setup      only install, into .venv          make clean    remove what make created'
	@echo 'PYTHON=$(PYTHON)  TORCH=$(TORCH)'

setup: .make/runtime
dev: .make/dev

.make/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'error: $(PYTHON) is missing or older than 3.10; fix: make PYTHON=/path/to/python3.10 (or newer)' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo 'error: $(PYTHON) has no venv module; fix: install it (Debian: apt install python3-venv)' >&2; exit 2; }
	@command -v $(CXX) >/dev/null || command -v c++ >/dev/null || \
	  { echo 'error: no C++ compiler; fix: install one (Debian: apt install g++) or set CXX' >&2; exit 2; }
	@test -x $(BIN)/python || { echo '== new virtual environment $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@mkdir -p .make && touch $@

# A torch that is already there is never replaced: other software may need exactly that one.
.make/torch: .make/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo '== $(TORCH)'; $(PIP) '$(TORCH)'; }
	@touch $@

# Kept in the environment, so that a changed C++ file can be rebuilt without a network.
.make/build-tools: .make/python
	@echo '== build tools'
	@$(PIP) 'scikit-build-core>=0.10' cmake ninja
	@touch $@

.make/runtime: .make/torch .make/build-tools pyproject.toml $(SOURCES)
	@echo '== octavo'
	@$(INSTALL) .
	@touch $@

.make/dev: .make/runtime pyproject.toml
	@echo '== tools for tests and checks'
	@$(INSTALL) '.[dev]'
	@touch $@

serve: .make/runtime
	@exec $(BIN)/octavo serve $(MODEL) --port $(PORT) $(ARGS)

demo: .make/runtime
	@exec $(BIN)/python -m octavo.tools.demo $(MODEL) $(ARGS)

test: .make/dev
	@$(BIN)/python -m pytest $(ARGS)

test-full: .make/dev
	@OCTAVO_FULL=1 $(BIN)/python tests/full.py $(PART)

check: .make/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP),$(BIN)/clang-format --dry-run -Werror $(CPP))

format: .make/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

clean:
	rm -rf .make $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find octavo -name '*.so' -delete
