# Everything a clone needs, with GNU make and a Python of 3.11 or newer.
#
#   make demo    train on four local processes, kill one halfway (out/demo.png, .json)
#   make test    all tests (under ten minutes on two cores)
#   make check   what CI runs: format, lint, types, house rules, tests
#   make soak    long runs: soak tests, properties on random examples, hundreds of seeds
#   make chaos   real processes, a bad network, kills: what a seed says (Linux, root); SEED=1
#   make experiments  a small version of every experiment, as one page: out/experiments/report.html
#   make format  let ruff rewrite what `make check` would complain about
#   make docs    write again the reference pages that are made from the code
#   make clean   remove the virtual environment and all caches
#
# Variables: PYTHON (which interpreter makes the environment), VENV (where it goes),
# JOBS (tests side by side: most of their time they wait for processes of their own),
# ARGS (more arguments for pytest, the demo or chaos: make test ARGS="-k ticket");
# SEED, PEERS and SECONDS of a chaos run: make chaos SEED=7 PEERS=16 SECONDS=600.
#
# A CPU build of torch. constraints.txt pins the version, so that every clone trains with the
# same one. On Linux, pip's default index serves that version with several gigabytes of CUDA
# libraries, which the tests and the demo never use. They are harmless, only big. To have
# the CPU build instead, tell pip where it is before the first `make`: PIP_EXTRA_INDEX_URL with
# the CPU index that PyTorch's "get started" page names, or PIP_FIND_LINKS with a folder that
# holds the wheel. No change here is needed: "2.13.0+cpu" satisfies the pin, and pip prefers it
# to plain "2.13.0". On macOS and Windows the default is the CPU build already.

VENV ?= .venv
JOBS ?= 2
ARGS ?=
SEED ?= 1
PEERS ?= 8
SECONDS ?= 600

ifndef PYTHON
# python3 first; the others only where it is too old (or newer than torch has wheels for).
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	>/dev/null 2>&1 && echo "$$p" && break; done)
endif

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
TEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: help demo test check soak chaos experiments format docs clean install
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.stamp-demo
	@mkdir -p out
	$(BIN)/moshpit demo --peers 4 --kill 1 --plot out/demo.png --json out/demo.json $(ARGS)

install: $(VENV)/.stamp-dev

test: $(VENV)/.stamp-dev
	$(TEST) $(ARGS)

check: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_house.py
	$(TEST) $(ARGS)

soak: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m "soak or hypothesis" --timeout 3600 $(ARGS)
	for scenario in $$($(BIN)/moshpit sim); do \
		case $$scenario in \
			thousand) seeds=0..2 ;; storm) seeds=0..999 ;; *) seeds=0..299 ;; \
		esac; \
		echo "$$scenario, seeds $$seeds"; \
		$(BIN)/moshpit sim "$$scenario" --seeds "$$seeds" --jobs 2 || exit 1; \
	done

chaos: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.chaos --seed $(SEED) --peers $(PEERS) --seconds $(SECONDS) $(ARGS)

experiments: $(VENV)/.stamp-dev
	$(BIN)/moshpit experiment all --small --report out/experiments $(ARGS)

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.stamp-dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf "$(VENV)" .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was made from, or it is made again; pip then only changes
# what has changed. The developers' tools come with the second one: the demo needs none.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[demo]'
	@touch "$@"

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[demo,dev,experiments]'
	@touch "$@" "$(VENV)/.stamp-demo"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Moshpit needs Python 3.11 to 3.14; none was found." \
		"Install one, or say which: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv "$(VENV)"
