# Every target makes what it needs in .venv, from nothing but python3 and make.
#   make PYTHON=python3.12       another interpreter
#   make VENV=/tmp/venv          another place for the virtual environment
#   make PYTEST_ARGS='-k grpo'   more arguments for pytest
# Each training framework, and SGLang, has a virtual environment of its own: .venv-verl, .venv-trl, .venv-sglang.
#   make test-verl VERL_VERSION=0.8.0   another verl, in .venv-0.8.0-verl
#   make FRAMEWORK_VENV=/tmp/venv-      another place and beginning of their names
#   make demo ENGINE=sglang             the whole job on a real SGLang server without a GPU, from .venv-sglang
#   make sglang-cpu MODEL=folder PORT=30001 ARGS='--tool-call-parser qwen'   such a server alone, on a model of yours
# pip's own variables are obeyed: PIP_EXTRA_INDEX_URL, for one, can name an index that has a smaller, CPU-only torch.

PYTHON ?= python3
VENV ?= .venv
VERL_VERSION ?=
FRAMEWORK_VENV ?= .venv-$(VERL_VERSION:%=%-)
PYTEST_ARGS ?=

BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
DUMP := examples/data/miles_session_v2.pt
AGENT := examples/session_v2_agentic
TRAIN := examples/train_tiny_agent
ROLLOUT := --agent $(AGENT)/agent.py:open_boxes --prompts $(AGENT)/prompts.jsonl --n-samples-per-prompt 4
OUT := out
CONFIG := configs/grpo.yaml
ENGINE ?= embedded
MODEL ?= $(OUT)/tiny
PORT ?= 30000
ARGS ?=

FRAMEWORKS := verl trl
ENVIRONMENTS := $(FRAMEWORKS) sglang
# What each has beside its requirements, and what its tests import: where that fails they would be skipped, so that the
# installation has to fail.
INSTALLED_verl = -e . $(VERL_VERSION:%=verl==%)
INSTALLED_trl := -e .
INSTALLED_sglang := -r requirements/smg.txt -e tools/sglang_cpu -e .
IMPORTED_verl := verl.trainer.ppo.ray_trainer
IMPORTED_trl := trl.trainer.grpo_trainer
IMPORTED_sglang := sglang_cpu, sglang, miles_norm.session.engines.hugging_face
SGLANG := $(FRAMEWORK_VENV)sglang
SGLANG_PYTHON := $(abspath $(SGLANG))/bin/python

# An editable install points at one folder: in a copied or moved checkout it is made again.
ORIGIN := $(CURDIR)
stale = $(shell [ "$$(cat $(1)/.origin 2>/dev/null)" = "$(ORIGIN)" ] || echo stale)

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

# create-venv FOLDER: an empty virtual environment, then torch, before anything may resolve it.
define create-venv
@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; name another with make PYTHON=..." >&2; exit 1; }
@$(PYTHON) -c "$$CHECK_PYTHON"
@echo "[1/3] virtual environment in $(1)"
@$(PYTHON) -m venv $(1)
@echo "[2/3] $(TORCH), the large one: seconds from a cache, minutes over a network"
@$(1)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) -c constraints.txt
endef

.DELETE_ON_ERROR:
.SECONDEXPANSION:
.PHONY: help install docs bias-study demo demo-job demo-embedded demo-sglang demo-dump demo-train demo-train-embedded demo-train-sglang evidence test test-session test-ray test-browser test-sglang sglang-cpu test-distributed $(FRAMEWORKS:%=test-%) test-integrations lint format bench clean stale
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' Makefile

$(VENV)/.demo: pyproject.toml constraints.txt $(call stale,$(VENV))
	$(call create-venv,$(VENV))
	@echo "[3/3] miles_norm, its command line and the session server"
	@$(PIP_INSTALL) -e '.[examples]' -c constraints.txt
	@echo '$(ORIGIN)' > $(VENV)/.origin
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "[dev] test tools, ruff, mypy"
	@$(PIP_INSTALL) -e '.[dev]' -c constraints.txt
	@touch $@

install: $(VENV)/.dev ## everything for development, into .venv

# show COMMAND: print it as one types it, then run it.
define show
@echo; echo '$$ $(1)'; PATH="$(abspath $(BIN)):$$PATH" $(1)
endef

demo: demo-$(ENGINE) ## the whole job: serve a policy, roll out an agent, normalize, convert, explain a row
	@echo; echo 'Next, an agent of your own against a server of its own:'
	@echo '  $(BIN)/miles-norm serve --set port=8811$(if $(filter embedded,$(ENGINE)), --model $(OUT)/policy.safetensors)'
	@echo '  $(BIN)/miles-norm rollout --server http://127.0.0.1:8811 --agent my_agent.py:solve --prompts prompts.jsonl -o rollout.jsonl'

demo-embedded: $(VENV)/.demo
	$(call show,python $(AGENT)/warm_start.py $(OUT)/policy.safetensors)
	@$(MAKE) --no-print-directory demo-job POLICY='--model $(OUT)/policy.safetensors'

demo-sglang: $(VENV)/.demo $(SGLANG)/.ready
	@$(SGLANG_PYTHON) -m sglang_cpu.tiny_model $(OUT)/boxes
	@$(SGLANG_PYTHON) $(AGENT)/warm_start_sglang.py $(OUT)/boxes
	@$(SGLANG_PYTHON) -m sglang_cpu.serve $(OUT)/boxes --port 0 --log $(OUT)/sglang.log --run '$(MAKE) --no-print-directory demo-job \
		POLICY="--engine sglang --engine-url $$SGLANG_URL --model $(OUT)/boxes"'

demo-job:
	$(call show,miles-norm rollout $(ROLLOUT) $(POLICY) -o $(OUT)/rollout.jsonl --force)
	$(call show,miles-norm normalize $(OUT)/rollout.jsonl --config $(CONFIG))
	$(call show,miles-norm convert $(OUT)/rollout.jsonl $(OUT)/train.safetensors --config $(CONFIG) --force)
	$(call show,miles-norm explain $(OUT)/rollout.jsonl --row 0 --config $(CONFIG))
	$(call show,miles-norm audit $(OUT)/rollout.jsonl --config $(CONFIG) -o $(OUT)/report.html --force)

demo-train: demo-train-$(ENGINE) ## a tiny agent learns to open boxes, two minutes; its curve is in out/train
demo-train-embedded: $(VENV)/.training
	$(call show,python $(TRAIN)/train.py $(OUT)/train --force)
	$(call show,python $(TRAIN)/evaluate.py $(OUT)/train/policy.safetensors)

demo-train-sglang: $(VENV)/.training $(SGLANG)/.ready
	@rm -rf $(OUT)/boxes
	@$(SGLANG_PYTHON) -m sglang_cpu.tiny_model $(OUT)/boxes
	@$(SGLANG_PYTHON) $(AGENT)/warm_start_sglang.py $(OUT)/boxes
	@$(SGLANG_PYTHON) -m sglang_cpu.serve $(OUT)/boxes --port 0 --log $(OUT)/sglang.log --run \
		'$(BIN)/python $(TRAIN)/train.py $(OUT)/train --force --steps 12 --engine sglang --engine-url $$SGLANG_URL --model $(OUT)/boxes && \
		$(BIN)/python $(TRAIN)/evaluate.py $(OUT)/train/policy --engine sglang --engine-url $$SGLANG_URL'

evidence: $(VENV)/.training ## three normalizations over eight seeds of that training: table and curves in out/compare
	@$(BIN)/python $(TRAIN)/compare.py $(OUT)/compare

demo-dump: $(VENV)/.demo ## normalize a recorded rollout dump, then explain one of its rows
	@echo; echo '$$ miles-norm normalize $(DUMP) --config $(CONFIG)'
	@$(BIN)/miles-norm normalize $(DUMP) --config $(CONFIG)
	@echo; echo '$$ miles-norm explain $(DUMP) --row 3 --config $(CONFIG)'
	@$(BIN)/miles-norm explain $(DUMP) --row 3 --config $(CONFIG)
	@echo; echo 'Next, a dump of your own (Miles or slime .pt, or .jsonl):'
	@echo '  $(BIN)/miles-norm normalize YOUR_DUMP.pt --config $(CONFIG) -o advantages.jsonl'

test: $(VENV)/.dev ## the fast tests and doctests, with the coverage floor
	@$(BIN)/python -m pytest --cov -n auto $(PYTEST_ARGS)

test-session: $(VENV)/.dev ## the session server: real processes, OpenAI's client, faults
	@$(BIN)/python -m pytest tests/session -n auto $(PYTEST_ARGS)

$(VENV)/.training: $(VENV)/.demo
$(VENV)/.ray $(VENV)/.browser $(VENV)/.plots $(VENV)/.docs: $(VENV)/.dev
$(VENV)/.ray $(VENV)/.browser $(VENV)/.plots $(VENV)/.docs $(VENV)/.training: $(VENV)/.%:
	@echo "[$*] what this needs beyond that"
	@$(PIP_INSTALL) -e '.[$*]' -c constraints.txt
	@touch $@

test-ray: $(VENV)/.ray ## a local Ray and a simulated cluster of four nodes
	@$(BIN)/python -m pytest tests/ray $(PYTEST_ARGS)

test-browser: $(VENV)/.browser ## the pages of audits and of running servers in a real Chromium, which CHROMIUM names
	@$(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

docs: $(VENV)/.docs ## the guides and the API reference as a site in build/site, strictly, and the tests of it
	@$(BIN)/zensical build --strict --clean
	@$(BIN)/python -m pytest tests/site $(PYTEST_ARGS)

bias-study: $(VENV)/.plots ## what cutting rollouts does to gradients, against a known one: tables and pictures in out/bias_study
	@$(BIN)/python examples/bias_study/run.py --rollouts 200000 -o $(OUT)/bias_study

test-distributed: $(VENV)/.dev ## gradients over two real processes
	@$(BIN)/python -m pytest tests/distributed $(PYTEST_ARGS)

$(ENVIRONMENTS:%=$(FRAMEWORK_VENV)%/.ready): $(FRAMEWORK_VENV)%/.ready: pyproject.toml constraints.txt requirements/%.txt \
		$$(call stale,$(FRAMEWORK_VENV)$$*)
	$(call create-venv,$(@D))
	@echo "[3/3] $* and what it imports"
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements/$*.txt
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(INSTALLED_$*)
	@$(@D)/bin/python -W ignore -c 'import $(IMPORTED_$*)'
	@echo '$(ORIGIN)' > $(@D)/.origin
	@touch $@

$(SGLANG)/.ready: requirements/smg.txt tools/sglang_cpu/pyproject.toml

$(OUT)/tiny/config.json: $(SGLANG)/.ready
	@$(SGLANG_PYTHON) -m sglang_cpu.tiny_model $(@D)

sglang-cpu: $(SGLANG)/.ready $(if $(filter $(OUT)/tiny,$(MODEL)),$(OUT)/tiny/config.json) ## an SGLang server without a GPU, on a tiny model
	@$(SGLANG_PYTHON) -m sglang_cpu.serve $(MODEL) --port $(PORT) $(ARGS)

test-sglang: $(VENV)/.dev $(VENV)/.training $(SGLANG)/.ready ## a real SGLang server, routers before two, one killed
	@SGLANG_PYTHON=$(SGLANG_PYTHON) $(BIN)/python -m pytest tests/sglang $(PYTEST_ARGS)

test-verl: ## estimators, losses and the plugin against verl, in .venv-verl
test-trl: ## optimizer steps of TRL's trainer, in .venv-trl
$(FRAMEWORKS:%=test-%): test-%: $(FRAMEWORK_VENV)%/.ready
	@$(FRAMEWORK_VENV)$*/bin/python -m pytest tests/integration/test_$*_*.py --doctest-ignore-import-errors \
		miles_norm/integrations/$**.py docs/integrations/$*.md $(PYTEST_ARGS)

test-integrations: $(FRAMEWORKS:%=test-%) ## every suite against a training framework

lint: $(VENV)/.dev ## ruff and mypy, changing nothing
	@status=0; for check in "ruff check" "ruff format --check" mypy; do \
		echo "== $$check"; $(BIN)/python -m $$check || status=1; \
	done; exit $$status

format: $(VENV)/.dev ## mend what ruff can mend
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

bench: $(VENV)/.ray $(VENV)/.browser $(VENV)/.plots ## a short set of every benchmark: figures beside what is asked for, JSON and a picture in build/bench
	@$(BIN)/python benchmarks/run_all.py

clean: ## remove the virtual environments and every cache
	@rm -rf .venv .venv-* out .cache .coverage .coverage.* htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
