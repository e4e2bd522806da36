PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
APP_SETUP := $(VENV)/.installed-app
BROWSER_SETUP := $(VENV)/.installed-browser
# XLA needs an older torch than constraints.txt has, so it has an environment of its own.
XLA_VENV := .venv-xla
XLA_SETUP := $(XLA_VENV)/.installed
# The lowest versions of setup.py have an environment of their own, too.
LOWEST_VENV := .venv-lowest
LOWEST_SETUP := $(LOWEST_VENV)/.installed
LOWEST := checkpoints data evaluation hub language_model_files masked_lm ready_checkpoints run_state scheduler_files sharding text_model
# An environment that has nothing but the wheel.
PACKAGE_VENV := .venv-package
SOURCES := src tests examples benchmarks docs/build_site.py docs/conf.py setup.py

# Tests in which no number depends on the CPU: files, sentences, data, scripts, and runs, whose formulas other tests check.
SAME_EVERYWHERE := antibodies app architecture bad_input checkpoints collator data docs evaluation examples hub pipeline_calls project reproduce scheduler_files site subclasses
SAME_EVERYWHERE += adapters hostile_files language_model_files loop remote_code run_state signals slurm state_files
SAME_EVERYWHERE += train_language_models training_push trajectory unused_weights wrong_values
SAME_EVERYWHERE += callbacks cards files gpu_table kills lm_harness script_headers sharding showcases sudoku tables trainer training
# Tests of a file share what is expensive to set up, so one process runs them all, in the order of tests/conftest.py.
TWO_PROCESSES := -n 2 --dist loadfile --no-loadscope-reorder
PORTABLE := -m pytest -q $(TWO_PROCESSES) $(SAME_EVERYWHERE:%=--ignore=tests/test_%.py)

# Tests of what transitions, losses and steps mean.
MEANING := transitions posterior losses loss_plain loss_limits scheduler samplers extending_transition kernels

# Checkpoints that `make app` shows, or all of examples/checkpoints/ and outputs/ if there are none here.
CHECKPOINTS ?=

.PHONY: demo app docs figure1 test test-browser test-definitions test-docs test-fast test-gpu test-lowest test-package test-portable test-slow test-xla bench style quality clean

# Trains a text model and an image model, and leaves them in outputs/ with pictures.
demo: $(SETUP)
	$(BIN)/python examples/demo.py

# A page to play with, on this machine: make app CHECKPOINTS="outputs/text your/checkpoint".
app: $(APP_SETUP)
	PYTHONPATH=examples $(BIN)/python -m d3pm_hf.app --import_module sudoku $(CHECKPOINTS)

# The paper's Figure 1: writes outputs/swiss_roll.png.
figure1: $(SETUP)
	$(BIN)/python examples/swiss_roll.py

# The documentation as a site that opens from disk: writes outputs/docs/index.html. A broken link is an error.
docs: $(SETUP)
	$(BIN)/python docs/build_site.py

# Quality comes first so that pytest's verdict is the last line.
test: quality
	$(BIN)/python -m pytest $(TWO_PROCESSES)

# A minute on one core: the losses, the steps and the draws of each family, once.
test-fast: $(SETUP)
	$(BIN)/python -m pytest -q --once tests/test_losses.py tests/test_posterior.py tests/test_kernels.py

# The tests of meaning without kernels: every number is that of its definition.
test-definitions: $(SETUP)
	D3PM_HF_KERNELS=0 $(BIN)/python -m pytest -q -n 2 --once $(MEANING:%=tests/test_%.py)

# What only a GPU can show, as one table to paste into an issue; without a GPU it says so.
test-gpu: $(SETUP)
	$(BIN)/python benchmarks/gpu.py

# The numerical tests on the code paths of CPUs without AVX-512, and of CPUs without vector instructions.
test-portable: $(SETUP)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(BIN)/python $(PORTABLE)
	ATEN_CPU_CAPABILITY=default $(BIN)/python $(PORTABLE)

# The page in a headless Chromium, which must be installed (Debian: apt-get install chromium).
test-browser: $(BROWSER_SETUP)
	$(BIN)/python -m pytest -q tests/browser

# Runs the code blocks of README.md, docs/ and docstrings, and follows the links inside the repository.
test-docs: $(SETUP)
	$(BIN)/python -m pytest -n 2 tests/test_docs.py tests/test_site.py

test-slow: $(SETUP)
	$(BIN)/python -m pytest $(TWO_PROCESSES) -m slow

# Training and sampling on an XLA device, which is a CPU here.
test-xla: $(XLA_SETUP)
	PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest -q tests/xla

# Files, data, training and the Hub with the lowest versions that setup.py allows.
test-lowest: $(LOWEST_SETUP)
	$(LOWEST_VENV)/bin/python -m pytest -q $(TWO_PROCESSES) $(LOWEST:%=tests/test_%.py)

# Builds the sdist, and from it the wheel, into dist/; the wheel then works in an environment of its own.
test-package:
	rm -rf build dist
	$(PYTHON) -m venv --clear $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install --quiet build==1.6.1
	$(PACKAGE_VENV)/bin/python -m build
	$(PYTHON) -m venv --clear $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	$(PACKAGE_VENV)/bin/python -c "from d3pm_hf import *"
	set -e; for name in app convert evaluation; do $(PACKAGE_VENV)/bin/python -m d3pm_hf.$$name --help; done

bench: $(SETUP)
	@set -e; for script in benchmarks/bench_*.py; do echo "$$script"; $(BIN)/python "$$script"; done

style: $(SETUP)
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

quality: $(SETUP)
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(XLA_VENV) $(LOWEST_VENV) $(PACKAGE_VENV) outputs build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last: an install that was cut short is taken up again by the next command.
$(SETUP): setup.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

$(APP_SETUP): $(SETUP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[app]"
	touch $@

$(BROWSER_SETUP): $(APP_SETUP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[browser]"
	touch $@

$(XLA_SETUP): setup.py pyproject.toml constraints.txt constraints-xla.txt
	$(PYTHON) -m venv $(XLA_VENV)
	grep -v '^torch==' constraints.txt | cat - constraints-xla.txt > $(XLA_VENV)/constraints.txt
	$(XLA_VENV)/bin/python -m pip install --quiet -c $(XLA_VENV)/constraints.txt -e ".[dev]" torch_xla
	touch $@

# torch comes first and alone, so that no other requirement chooses its build.
$(LOWEST_SETUP): setup.py pyproject.toml constraints.txt constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	sed -n 's/^\([a-z_]*\)==.*/^\1==/p' constraints-lowest.txt | grep -v -f - constraints.txt | cat - constraints-lowest.txt > $(LOWEST_VENV)/constraints.txt
	$(LOWEST_VENV)/bin/python -m pip install --quiet -c $(LOWEST_VENV)/constraints.txt torch
	$(LOWEST_VENV)/bin/python -m pip install --quiet -c $(LOWEST_VENV)/constraints.txt -e ".[dev]"
	touch $@
