# Each target sets up what it needs in .venv: nothing has to be installed before but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# a worker for every core, a file to each, in conftest's order: the blocks of a page share their names
PYTEST := $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder
BUILD_DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
# pip would compile every module of every package; Python compiles those that it imports
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt
# what the kernel is built into by `make demo` stays, so that no other target builds it again
ADD := PHASOR_NO_KERNEL=1 $(PIP)
# some machines forbid Python to keep what it compiled: each of the tests' processes would compile torch
unexport PYTHONDONTWRITEBYTECODE
MADE_BY := pyproject.toml constraints.txt setup.py $(wildcard csrc/*)
# of the machine that bench/gpu_session.md is for
GPU_MACHINE := torch==2.11.0 triton==3.6.0 transformers==5.17.0 numpy 'click==8.1.*' rich pytest pytest-xdist hypothesis mpmath

.PHONY: help demo test test-slow test-gpu-kernels test-machines check docs docs-serve bench bench-gpu rehearse-gpu sanitize valgrind neon figures names clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

demo: $(VENV)/demo.done  ## read a real configuration, rotate with it, prove the result
	$(BIN)/phasor demo

test: $(VENV)/test.done  ## the everyday tests
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/check.done  ## the tests too long for every day, with all their cases
	$(PYTEST) -m "slow and not every_kernel"

test-gpu-kernels: $(VENV)/test.done  ## the GPU kernel on the CPU, in every shape, and as PTX for three devices
	$(PYTEST) -m every_kernel tests/gpu tests/ptx

test-machines: $(VENV)/test.done  ## the everyday tests as on other machines, one by one; half an hour
	$(BIN)/python tools/machines.py $(ARGS)

check: $(VENV)/check.done  ## what CI runs: format, lint, types, everyday and slow tests, strict documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
# types beside the pages: pyright takes one core
	$(BIN)/pyright --pythonpath $(BIN)/python & types=$$!; \
	$(BUILD_DOCS) && $(BIN)/python -m tools.site_check site && wait $$types
	$(BIN)/python -m tools.facts
	$(PYTEST) -m "not every_kernel and not more_cases"

docs: $(VENV)/docs.done  ## build the documentation into site/, strictly
	$(BUILD_DOCS)

docs-serve: $(VENV)/docs.done  ## show the documentation at http://localhost:8000/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: $(VENV)/bench.done  ## measure the CPU kernel against the others, about five minutes
	$(BIN)/python bench/run.py

bench-gpu: $(VENV)/bench.done  ## measure the GPU kernels against the others; needs a CUDA device
	$(BIN)/python bench/run.py --device cuda

rehearse-gpu: $(VENV)/gpu.done  ## the commands of bench/gpu_session.md, on the CPU, with a GPU machine's versions
	$(VENV)/gpu/bin/python -m bench.rehearse_gpu

sanitize: $(VENV)/test.done  ## the CPU kernel's tests under AddressSanitizer and UBSan
	$(BIN)/python tests/native/checks.py sanitize

valgrind:  ## the CPU kernel's sweeps under memcheck
	$(PYTHON) tests/native/checks.py valgrind

neon:  ## the CPU kernel's sweeps for 64-bit Arm, cross-built and emulated
	$(PYTHON) tests/native/checks.py neon

figures: $(VENV)/docs.done  ## draw the pictures of the README and the documentation
	$(BIN)/python -m docs.draw

names: $(VENV)/test.done  ## write the public names with their signatures, which a test compares
	$(BIN)/python -m tools.public_names

clean:  ## remove the environment and everything built
	rm -rf $(VENV) site build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# pip learned dependency groups in 25.1; the one that Python brings may be older
$(VENV)/python.done:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("phasor needs Python 3.11 or newer, got " + sys.version.split()[0] + "; say make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/demo.done: $(MADE_BY) | $(VENV)/python.done
	$(PIP) --editable '.[torch]'
	@touch $@

$(VENV)/test.done: $(VENV)/demo.done
	$(ADD) --editable '.[torch,charts]' --group test
	@touch $@

$(VENV)/check.done: $(VENV)/demo.done
	$(ADD) --editable '.[torch,charts]' --group check --group docs
	@touch $@

$(VENV)/bench.done: $(VENV)/demo.done
	$(ADD) --editable '.[torch]' --group peers
	@touch $@

# without constraints.txt: what such a machine has
$(VENV)/gpu.done: | $(VENV)/python.done
	$(PYTHON) -m venv $(VENV)/gpu
	$(VENV)/gpu/bin/python -m pip install --no-compile --quiet --disable-pip-version-check $(GPU_MACHINE)
	@touch $@

$(VENV)/docs.done: $(VENV)/demo.done
	$(ADD) --editable '.[torch,charts]' --group docs
	@touch $@
