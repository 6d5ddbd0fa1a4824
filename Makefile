# Needs Python 3.10 or newer with pip, and nothing else. Everything is installed into .venv.
# PYTHON=python3.12 chooses another interpreter. pip's own variables apply: PIP_EXTRA_INDEX_URL may name an index with
# PyTorch's CPU-only builds, which saves a download of several GB where there is no GPU.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format bench install clean

help:
	@echo "make demo       build SmolLM2-135M, serve it, ask it a question"
	@echo "make test       all tests but the slow ones"
	@echo "make test-slow  the tests that take minutes"
	@echo "make check      linter, formatter and type checker"
	@echo "make format     let the linter and the formatter mend what they can"
	@echo "make bench      a short benchmark; PEERS=DIR adds one beside other systems (benchmarks/README.md)"
	@echo "make clean      remove .venv and caches (plans in engines/ stay)"

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(STAMP)
	$(BIN)/python benchmarks/smoke.py
ifdef PEERS
	$(BIN)/python benchmarks/peers.py --peers $(PEERS)
endif

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "trtcb needs Python 3.10 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "this Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV): minutes the first time"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
