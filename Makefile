# make demo   trains a small GPT with the operator and with F.cross_entropy, compares them -> demo_output/
# make check  ruff, mypy, the layering, and tests of every part of the package: what to run between edits, 80 seconds
# make test   ruff, mypy, pytest (the tests marked `gpu` only where CUDA is), of each test a part: 3.5 minutes, 5 in a fresh clone
# make test-all  every test that needs no GPU: what .ci/run calls, 10 minutes
# make nightly   the tests with new inputs, 20,000 random cases on the CPU, 2,000 of the kernels in the interpreter, 10,000 steps
# make matrix the core of the tests under the oldest torch and Triton that the package allows, and under the newest
# make newest a short list of tests under the newest torch, Triton and Transformers
# make test-gpu the tests that need a GPU, on all cards at once
# make triton-versions  every kernel, interpreted and compiled, by the oldest and the newest Triton that the package allows (Linux)
# make wheel  builds sdist and wheel into dist/, and tests the wheel in an environment that PYTHON makes: release/smoke.py
# make release  what is to be published, built and checked: refused while pyproject.toml's URLs are placeholders
# make deepspeed runs the tests under DeepSpeed's ZeRO-3, which it installs into a folder of its own (Linux)
# make docs   builds the pages of docs/ into site/, a warning is an error (the test suite does the same)
# All first make .venv with the versions of requirements.txt and this package. Pass e.g. PYTHON=python3.12, DEMO_ARGS="--steps 40".

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
# A pytest process a core, each with its share of threads (tests/conftest.py), at most 4: one and its process groups take up to 4 GB.
# worksteal: neighbours stay together, as they share compiled code and process groups, until a worker has nothing left to do.
# Where CUDA is, one process: measurements of time and memory must not meet on the GPU.
PYTEST_WORKERS ?= -n logical --maxprocesses 4 --dist worksteal

# OpenMP's threads sleep while they wait for each other. Spinning, the default, made the demo's steps 2-4x slower on two cores
# shared with other work.
OMP_WAIT_POLICY ?= PASSIVE
export OMP_WAIT_POLICY

VENV := .venv
BIN := $(VENV)/bin
# Stamps: younger than what they were made from, so a second call installs nothing. The demo needs torch, NumPy and
# Matplotlib; every other command adds what the tests need to the same environment.
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed

.PHONY: demo check test test-all test-gpu nightly matrix newest triton-versions deepspeed wheel release docs lint types format toolchain clean

demo: $(DEMO) toolchain
	$(BIN)/python -m examples.train_gpt $(DEMO_ARGS)

# one or two quick files of each part
CHECKED := layers paths bad_input double_backward dependent_operands scalars zero_denominators chunks \
    graphs workspace vendor modules kl_div_conventions saturated_softcap small_batches transformers_refusals plan

check: lint types
	$(BIN)/python -m pytest -q -m "not gpu and not multigpu" $(PYTEST_ARGS) $(CHECKED:%=tests/*/test_%.py)

test: lint types toolchain
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    echo "CUDA: running every test"; $(BIN)/python -m pytest $(PYTEST_ARGS); \
	else \
	    echo "no CUDA: leaving out the tests marked gpu"; \
	    $(BIN)/python -m pytest -m "not gpu and not multigpu" --quick $(PYTEST_WORKERS) $(PYTEST_ARGS); \
	fi

test-all: lint types toolchain
	$(BIN)/python -m pytest -m "not gpu and not multigpu" $(PYTEST_WORKERS) $(PYTEST_ARGS)

FUZZ_SEED ?= $(shell date +%Y%m%d)

# The date draws the inputs, which are the same on every other run: a failure prints its seed.
nightly: $(INSTALLED)
	FLCE_TEST_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest -m "not gpu and not multigpu" $(PYTEST_WORKERS) $(PYTEST_ARGS)
	$(BIN)/python -m tests.fuzz --cases 20000 --workers $$(nproc) --seed $(FUZZ_SEED)
	$(BIN)/python -m tests.fuzz --device interpreter --cases 2000 --workers $$(nproc) --seed $(FUZZ_SEED)
	$(BIN)/python -m tests.long_run --steps 10000

# Environments of their own. PyPI's torch brings CUDA, 5 GB each, unless PIP_EXTRA_INDEX_URL names the CPU builds.
CORE := import torch_private compile scalars export opcheck graphs numerics cross_entropy ops kl_div_operator \
    double_backward func checkpoint faults every_kernel
MATRIX_TOOLS := "pytest>=9" "pytest-xdist>=3.8" "expecttest>=0.3"
# Triton 3.6's interpreter does not work with numpy 2.4
OLDEST := "torch==2.11.*" "numpy==2.2.*"
NEWEST := torch numpy

# What a new version breaks first, and a trainer.
SHORT := torch_private compile export opcheck local_shapes distributed transformers_training

newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --disable-pip-version-check --quiet --upgrade $(NEWEST) $(MATRIX_TOOLS) \
	    transformers accelerate
	$(VENV)-newest/bin/python -m pytest -m "not gpu and not multigpu" --quick $(PYTEST_WORKERS) $(PYTEST_ARGS) \
	    $(SHORT:%=tests/*/test_%.py)

matrix:
	for versions in oldest newest; do \
	    $(PYTHON) -m venv $(VENV)-$$versions && \
	    if [ $$versions = oldest ]; then set -- $(OLDEST); else set -- $(NEWEST); fi && \
	    $(VENV)-$$versions/bin/python -m pip install --disable-pip-version-check --quiet --upgrade "$$@" $(MATRIX_TOOLS) && \
	    $(VENV)-$$versions/bin/python -m pytest -m "not gpu and not multigpu" --quick $(PYTEST_WORKERS) $(PYTEST_ARGS) \
	        $(CORE:%=tests/*/test_%.py) || exit 1; \
	done

# The tests that need a GPU: the cards' share of the cores as workers, at most 13 a card, then those of several processes,
# then those that need most of a card.
CARDS = $(shell $(BIN)/python -c 'import torch; print(torch.cuda.device_count())')
GPU_WORKERS = $(shell echo $$(( $(CARDS) * 13 < $$(nproc) ? $(CARDS) * 13 : $$(nproc) )))

test-gpu: $(INSTALLED)
	FLCE_CARDS=$(CARDS) $(BIN)/python -m pytest -m "gpu and not multigpu" -n $(GPU_WORKERS) --dist worksteal $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m multigpu -n 3 --dist worksteal $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/kernels/test_cuda_sizes.py

# Run in the interpreter, and compiled for a Hopper GPU: each refuses code that the other takes.
EVERY_KERNEL := tests/kernels/test_every_kernel.py \
    tests/kernels/test_triton_compiles.py::test_kernels_of_objectives_compile_for_a_gpu \
    "tests/kernels/test_triton_compiles.py::test_every_kernel_compiles_for_the_card_and_fits_its_shared_memory[8192-512-90-232448]"

# --target, --no-deps: torch asks for its own Triton, which stays in .venv for everything else. Both versions at once.
triton-versions: $(INSTALLED)
	for version in oldest newest; do \
	    { { [ $(VENV)/$$version/.installed -nt requirements-$$version.txt ] || \
	        $(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade --no-deps \
	            --target $(VENV)/$$version -r requirements-$$version.txt; } && touch $(VENV)/$$version/.installed && \
	    PYTHONPATH=$(VENV)/$$version $(BIN)/python -m pytest -q $(PYTEST_ARGS) $(EVERY_KERNEL); } \
	        >$(VENV)/triton-$$version.log 2>&1 & eval "$$version=$$!"; \
	done; wait $$oldest; failed=$$?; wait $$newest || failed=$$?; \
	if [ $$failed = 0 ]; then grep -H passed $(VENV)/triton-*.log; else cat $(VENV)/triton-*.log; fi; exit $$failed

wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(PYTHON) -m release.smoke dist/*.whl

# In an environment of its own, so that the build sees nothing but what pyproject.toml asks for.
release:
	$(PYTHON) -m release.placeholders
	rm -rf dist
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --disable-pip-version-check --quiet build==1.6.1 twine==7.0.0
	$(VENV)-release/bin/python -m build
	$(VENV)-release/bin/python -m twine check --strict dist/*
	$(PYTHON) -m release.smoke dist/*.whl

deepspeed: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade --no-deps --target $(VENV)/deepspeed -r requirements-deepspeed.txt
	PYTHONPATH=$(VENV)/deepspeed $(BIN)/python -m pytest $(PYTEST_ARGS) tests/integrations/test_deepspeed.py

docs: $(INSTALLED)
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || { echo "the pages need Python 3.11 or later: make PYTHON=python3.12 ..."; exit 1; }
	$(BIN)/python -m mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/python -m mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DEMO): requirements-demo.txt pyproject.toml setup.py flce_ops/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "$(PYTHON) is missing or older than 3.10: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' \
	    || { echo "$(PYTHON) has no venv module: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-demo.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -e .
	@touch $@

$(INSTALLED): $(DEMO) requirements.txt requirements-clients.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r requirements-clients.txt
	@touch $@

# torch.compile's C++ backend wants a compiler and Python's headers. A note, not an error: the demo says what it does without.
toolchain: $(DEMO)
	@command -v "$${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null \
	    || echo "NOTE: no C++ compiler, so torch.compile cannot generate CPU code: apt-get install g++"
	@$(BIN)/python -c 'import pathlib, sys, sysconfig; \
	    sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists())' \
	    || echo "NOTE: no Python.h, so torch.compile cannot build its CPU code: apt-get install python3-dev"

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-release build dist site *.egg-info demo_output .pytest_cache .ruff_cache
