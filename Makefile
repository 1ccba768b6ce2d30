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
# What make stops with when pip has failed and said why.
FAILED = { echo "error: pip could not install $(1), for the reason above; fix: if its index cannot be reached, check the" \
  "network and pip's settings ($(BIN)/python -m pip config list); the first run cannot do without" >&2; exit 2; }
SOURCES := $(shell find csrc -type f -not -name '*.o' 2>/dev/null)
CPP := $(filter %.cpp %.cc %.h %.hpp,$(SOURCES))

# Which Python it is, for comparing an environment with what is asked for.
IDENTITY := import sys; print(sys.version.split()[0], "in", sys.base_prefix)
# Ends with 1 when the torch that is installed is not the one that the first argument asks for.
define SATISFIED
import sys
from importlib.metadata import version
from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
wanted, installed = sys.argv[1], version("torch")
try:
    Requirement(wanted)
except InvalidRequirement:
    sys.exit(f"error: TORCH={wanted} is no requirement; fix: write TORCH=torch==2.13.0 or TORCH='torch @ file:///…'")
if not Requirement(wanted).specifier.contains(installed, prereleases=True):
    sys.exit(f"error: torch {installed} is installed and TORCH={wanted} asks for another; "
             "fix: make clean first, or leave TORCH out")
endef
export SATISFIED

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
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo 'error: $(PYTHON) is missing or older than 3.10; fix: make PYTHON=/path/to/python3.10 (or newer)' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'error: $(PYTHON) has no venv module; fix: install it (Debian: apt install python3-venv)' >&2; exit 2; }
	@command -v $(CXX) >/dev/null || command -v c++ >/dev/null || \
	  { echo 'error: no C++ compiler; fix: install one (Debian: apt install g++) or set CXX' >&2; exit 2; }
	@test -x $(BIN)/python || { echo '== new virtual environment $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@mkdir -p .make && touch $@

# A PYTHON or TORCH that is asked for and not the one in use is an error, also when all is installed.
ifneq ($(origin PYTHON),file)
.make/python: | same-python
endif
ifneq ($(origin TORCH),file)
.make/runtime: | same-torch
endif

.PHONY: same-python same-torch
same-python:
	@test ! -x $(BIN)/python || test "$$($(PYTHON) -c '$(IDENTITY)' 2>&1)" = "$$($(BIN)/python -c '$(IDENTITY)')" || \
	  { echo "error: $(VENV) has Python $$($(BIN)/python -c '$(IDENTITY)') and PYTHON=$(PYTHON) is not that one;" \
	    "fix: make clean first, or leave PYTHON out" >&2; exit 2; }

same-torch: .make/torch
	@$(BIN)/python -c "$$SATISFIED" '$(TORCH)'

# A torch that is already there is never replaced: other software may need exactly that one.
.make/torch: .make/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  { echo '== $(TORCH)'; $(PIP) '$(TORCH)' || $(call FAILED,$(TORCH)); }
	@touch $@

# Kept in the environment, so that a changed C++ file can be rebuilt without a network.
.make/build-tools: .make/python
	@echo '== build tools'
	@$(PIP) 'scikit-build-core>=0.10' cmake ninja || $(call FAILED,the build tools)
	@touch $@

.make/runtime: .make/torch .make/build-tools pyproject.toml $(SOURCES)
	@echo '== octavo'
	@$(INSTALL) . || $(call FAILED,octavo)
	@touch $@

.make/dev: .make/runtime pyproject.toml
	@echo '== tools for tests and checks'
	@$(INSTALL) '.[dev]' || $(call FAILED,the tools for tests)
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
	find octavo tests bench -name __pycache__ -prune -exec rm -rf {} +
