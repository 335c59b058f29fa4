# Two commands do everything: `make quickstart` and `make test`. Both install into .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What the quickstart needs, a part of all that is installed.
FIRST := $(VENV)/.first

export DS_BUILD_OPS := 0
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1
# A test begins dozens of processes; without bytecode on the disk each of them would compile thousands of files anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow test-gpu gpu-first bench-gpu campaign compat test-core models watch release-check lint types docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

install: $(STAMP)  ## build .venv with every extra (first time only)

# What the machine lacks is said in one line, before anything is fetched.
define CHECKS
import shutil, sys
version = sys.version_info
version >= (3, 11) or sys.exit(f"ullage needs Python 3.11 or newer, found {version[0]}.{version[1]}: make PYTHON=python3.11")
free = shutil.disk_usage(".").free / 1e9
free > 4 or sys.exit(f"too little disk: the environment takes 4 GB here, found {free:.1f} GB free")
endef
export CHECKS

# Bytecode is made of what is imported, when it is: of all that is installed it would take a minute.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# torch goes first: DeepSpeed's build step imports it.
$(FIRST): pyproject.toml constraints.txt
	@$(PYTHON) -c "$$CHECKS"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch hatchling editables setuptools
	$(PIP) --no-build-isolation --editable '.[hf,deepspeed]'
	@touch $(FIRST)

# The planner is compiled meanwhile, out of src: pip is replacing the installation.
$(STAMP): $(FIRST)
	PYTHONPATH=src $(BIN)/python -c "from ullage.planning.solver.compiled import compile_all; compile_all()" & \
	$(PIP) --no-build-isolation --editable '.[dev]' && wait $$!
	@touch $(STAMP)

quickstart: $(FIRST)  ## one run on four layouts: packed, stopped, converted, continued; four minutes on two cores
	$(BIN)/python examples/00_quickstart.py

# The tests of one room: make test ROOM=planning. Without ROOM, all of them.
TESTS = $(if $(ROOM),tests/$(ROOM))

test: install  ## the tests, minutes on two cores; ROOM=planning for those of one room
	$(BIN)/python -m pytest $(TESTS) -n 3 --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu' $(PYTEST_ARGS)

test-slow: install  ## the rest of the tests; ROOM= as above
	$(BIN)/python -m pytest $(TESTS) -n 3 --dist loadfile --no-loadscope-reorder -m 'slow and not long and not gpu' $(PYTEST_ARGS)

# Tests that import no torch, transformers or datasets.
CORE := tests/layout tests/cli/test_interruption.py $(addprefix tests/planning/test_,padded.py planning.py planning_properties.py solver.py) \
	$(addprefix tests/report/test_,checkpoint_page.py curves.py plan_page.py)

test-core:  ## the tests that need no PyTorch, in an environment without it: make test-core PYTHON=python3.13
	test -x build/core/bin/python || $(PYTHON) -m venv build/core
	build/core/bin/python -m pip install --quiet numpy jinja2 rich typer numba pytest hypothesis
	build/core/bin/python -m compileall -q src
	PYTHONPATH=src build/core/bin/python -m pytest $(CORE) -m 'not gpu' $(PYTEST_ARGS)

test-gpu:  ## the CUDA paths against the CPU's numbers, with the torch that this machine has; nothing is installed
	@$(PYTHON) tests/gpu/run.py $(PYTEST_ARGS)

gpu-first:  ## the first ten minutes on a GPU: right or wrong, a Llama of a billion parameters, attention; OUT=FOLDER
	@$(PYTHON) tests/gpu/first.py

bench-gpu:  ## speed and memory on this machine's GPU beside their rivals; nothing is installed; ARGS="--cases attention"
	@$(PYTHON) -m benchmarks.gpu $(ARGS)

campaign: $(if $(wildcard benchmarks/campaigns/$(NAME).py),install)  ## a long check: make campaign NAME=... [ARGS=...]; without NAME their list
	@if [ -n "$(NAME)" ] && [ -f "benchmarks/campaigns/$(NAME).py" ]; then \
		exec $(BIN)/python "benchmarks/campaigns/$(NAME).py" $(ARGS); fi; \
	[ -z "$(NAME)" ] || echo "no such campaign: $(NAME)"; \
	for script in benchmarks/campaigns/*.py; do [ -f "$$script" ] || continue; \
		printf '  make campaign NAME=%-16s %s\n' "$$(basename "$$script" .py)" "$$(head -n 1 "$$script" | tr -d '\"')"; done; \
	[ -z "$(NAME)" ]

compat: install  ## every way of packing, evaluation and resuming on the oldest and newest transformers; two minutes
	@$(BIN)/python benchmarks/campaigns/versions.py --quick

models: install  ## audit a tiny model of every type of transformers, and write docs/models.md; minutes
	@$(BIN)/python -m maintenance.models_page docs/models.md

watch: install  ## what the adapters rely on in other frameworks, and what has changed: make watch VERL=path
	@$(BIN)/python maintenance/watch.py $(filter-out PYTHON=% ROOM=% NAME=% ARGS=%,$(MAKEOVERRIDES))

release-check:  ## could a release be cut? built, installed, tried; minutes; REPOSITORY=https://HOST/OWNER/ullage
	@$(if $(REPOSITORY),ULLAGE_REPOSITORY='$(REPOSITORY)') $(PYTHON) maintenance/release.py $(ARGS)

lint: install  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## pyright
	$(BIN)/pyright

docs: install  ## the documentation site, into build/site; a warning is an error
	$(BIN)/mkdocs build --strict --quiet

clean:  ## remove the environment and what was built
	rm -rf $(VENV) build dist runs .pytest_cache .ruff_cache
