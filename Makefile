# Every target makes what it needs in .venv, from nothing but python3 and make.
#   make PYTHON=python3.12       another interpreter
#   make VENV=/tmp/venv          another place for the virtual environment
#   make PYTEST_ARGS='-k grpo'   more arguments for pytest
# Suites against a training framework have a virtual environment of their own, .venv-verl.
# pip's own variables are obeyed: PIP_EXTRA_INDEX_URL, for one, can name an index that has a smaller, CPU-only torch.

PYTHON ?= python3
VENV ?= .venv
VERL_VENV ?= .venv-verl
PYTEST_ARGS ?=

BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
VERL_PIP_INSTALL := $(VERL_VENV)/bin/python -m pip install -qq --disable-pip-version-check
DUMP := examples/data/miles_session_v2.pt
CONFIG := configs/grpo.yaml

# An editable install points at one folder: in a copied or moved checkout it is made again.
ORIGIN := $(CURDIR)
ifneq ($(shell cat $(VENV)/.origin 2>/dev/null),$(ORIGIN))
STALE := stale
endif
ifneq ($(shell cat $(VERL_VENV)/.origin 2>/dev/null),$(ORIGIN))
STALE_VERL := stale
endif

# Readable by any Python, so that an old one can be told what is wrong with it.
define CHECK_PYTHON
import sys
version = sys.version.split()[0]
if sys.version_info < (3, 11):
    sys.exit("miles_norm needs Python 3.11 or newer, and $(PYTHON) is " + version + ". Try: make PYTHON=python3.12")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("$(PYTHON) (" + version + ") has no venv or ensurepip. On Debian and Ubuntu: apt-get install python3-venv")
endef
export CHECK_PYTHON

.DELETE_ON_ERROR:
.PHONY: help install demo test test-distributed test-verl lint format bench clean stale
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

$(VENV)/.demo: pyproject.toml constraints.txt $(STALE)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; name another with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@echo "[1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] $(TORCH), the large one: seconds from a cache, minutes over a network"
	@$(PIP_INSTALL) $(TORCH) -c constraints.txt
	@echo "[3/3] miles_norm and its command line"
	@$(PIP_INSTALL) -e '.[cli]' -c constraints.txt
	@echo '$(ORIGIN)' > $(VENV)/.origin
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "[dev] test tools, ruff, mypy"
	@$(PIP_INSTALL) -e '.[cli,dev]' -c constraints.txt
	@touch $@

install: $(VENV)/.dev ## everything for development, into .venv

demo: $(VENV)/.demo ## normalize a real rollout dump, then explain one of its rows
	@echo; echo '$$ miles-norm normalize $(DUMP) --config $(CONFIG)'
	@$(BIN)/miles-norm normalize $(DUMP) --config $(CONFIG)
	@echo; echo '$$ miles-norm explain $(DUMP) --row 3 --config $(CONFIG)'
	@$(BIN)/miles-norm explain $(DUMP) --row 3 --config $(CONFIG)
	@echo; echo 'Next, a dump of your own (Miles or slime .pt, or .jsonl):'
	@echo '  $(BIN)/miles-norm normalize YOUR_DUMP.pt --config $(CONFIG) -o advantages.jsonl'

test: $(VENV)/.dev ## the fast tests and doctests, with the coverage floor
	@$(BIN)/python -m pytest --cov -n auto $(PYTEST_ARGS)

test-distributed: $(VENV)/.dev ## gradients over two real processes
	@$(BIN)/python -m pytest tests/distributed $(PYTEST_ARGS)

$(VERL_VENV)/.verl: pyproject.toml constraints.txt requirements/verl.txt $(STALE_VERL)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; name another with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@echo "[1/3] virtual environment in $(VERL_VENV)"
	@$(PYTHON) -m venv $(VERL_VENV)
	@echo "[2/3] $(TORCH), the large one: seconds from a cache, minutes over a network"
	@$(VERL_PIP_INSTALL) $(TORCH) -c constraints.txt
	@echo "[3/3] verl and what its advantage functions import"
	@$(VERL_PIP_INSTALL) --no-deps -r requirements/verl.txt
	@$(VERL_PIP_INSTALL) --no-deps -e .
	@# Where a package is missing the tests are skipped, so that it has to fail here.
	@$(VERL_VENV)/bin/python -c 'import verl.trainer.ppo.core_algos'
	@echo '$(ORIGIN)' > $(VERL_VENV)/.origin
	@touch $@

test-verl: $(VERL_VENV)/.verl ## advantages and losses against those of verl, in .venv-verl
	@$(VERL_VENV)/bin/python -m pytest -m integration tests/integration/test_verl_*.py $(PYTEST_ARGS)

lint: $(VENV)/.dev ## ruff and mypy, changing nothing
	@status=0; for check in "ruff check" "ruff format --check" mypy; do \
		echo "== $$check"; $(BIN)/python -m $$check || status=1; \
	done; exit $$status

format: $(VENV)/.dev ## mend what ruff can mend
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

bench: $(VENV)/.dev ## every benchmark, each against a baseline of the same run
	@for file in benchmarks/*.py; do \
		[ -e "$$file" ] || continue; echo "== $$file"; $(BIN)/python "$$file" || exit 1; \
	done

clean: ## remove the virtual environments and every cache
	@rm -rf .venv .venv-verl .coverage .coverage.* htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
