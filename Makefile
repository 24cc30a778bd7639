# Everything runs in a virtual environment of its own: VENV says where, PYTHON which interpreter makes it.
PYTHON ?= python3
VENV ?= .venv
RUNS := $(CURDIR)/runs
BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.detgraph-installed

# Upstream keeps its settings, and the place of its run folders, per user: ours stay in this clone and leave those alone.
export YOLO_OFFLINE := true
export YOLO_CONFIG_DIR := $(RUNS)/config

.DEFAULT_GOAL := help
.PHONY: help venv install demo lint format test test-all test-gpu bench goldens upstream-range torch-range gate gate-accelerator clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## make the virtual environment and install detgraph with its tools; no-op when up to date

$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet -e '.[dev]'
	touch $@

install:  ## install this tree into the active environment (PYTHON), without the tools
	$(PYTHON) -m pip install .

demo: venv  ## draw the demo data set and train on it with capture_network=True: a minute or two without a GPU
	$(BIN)/python -m detgraph.cfg.demo $(RUNS)/demo-data
	$(BIN)/yolo train model=yolo26n.yaml data=$(RUNS)/demo-data/data.yaml cfg=cfg/recipes/demo.yaml \
		capture_network=True project=$(RUNS) name=demo

lint: venv  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: venv  ## the tests that end within minutes; GPU tests skip, with a reason, where there is none
	$(BIN)/pytest -m "not slow"

test-all: venv  ## all tests, the slow ones too
	$(BIN)/pytest

test-gpu: venv  ## the GPU tests; without a GPU they fail instead of skipping
	DETGRAPH_REQUIRE_GPU=1 $(BIN)/pytest -m gpu

bench: venv  ## time complete fits, arm against arm: ARMS, DATA, WORDS, PAIRS, WARMUP, BUDGET, RECORD, see docs/benchmarks.md
	$(BIN)/python benchmarks/bench.py '$(or $(RECORD),$(RUNS)/bench/bench.json)' \
		$(foreach arm,$(ARMS),--arm '$(arm)') $(if $(DATA),--data '$(DATA)') $(if $(PAIRS),--pairs $(PAIRS)) \
		$(if $(WARMUP),--warmup $(WARMUP)) $(if $(BUDGET),--budget $(BUDGET)) -- $(WORDS)

goldens: venv  ## record the goldens anew and show what changed; DEVICE=0 for those of an H200, ARGS=--dry-run to look
	$(BIN)/python tests/goldens/goldens.py --device $(or $(DEVICE),cpu) $(ARGS)

upstream-range: venv  ## drift check and a short parity case against upstream's last releases; VERSIONS="8.4.189 ..."
	$(BIN)/python tests/upstream_range.py --folder $(RUNS)/upstream-range $(VERSIONS)

torch-range: venv  ## the tests of replay with the oldest and the newest torch that pyproject.toml allows; VERSIONS="2.9.1 ..."
	$(BIN)/python tests/torch_range.py --folder $(RUNS)/torch-range $(VERSIONS)

gate:  ## what a commit has to pass: lint, drift, docs, tests, goldens, wheel; stops at the first red
	$(PYTHON) tests/gate.py --venv $(VENV)

gate-accelerator:  ## the gate and the GPU tests; without CUDA it fails. ACTIVE=1 takes the environment as it is
	$(PYTHON) tests/gate.py --accelerator $(if $(ACTIVE),--active,--venv $(VENV))

clean:  ## remove the virtual environment, runs, caches and build outputs
	rm -rf $(VENV) $(RUNS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .ci/venv.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
