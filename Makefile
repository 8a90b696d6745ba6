# `make demo` trains a small model. `make test` runs linter, type checker and tests.
# `make check` runs linter, type checker and the quick checks of the tree, within a minute.
# `make docs` builds the documentation site in build/site.
# `make engines` installs vLLM and SGLang, each into an environment of its own (scripts/engines.sh);
# `make test-engines` runs the tests that need them. `make nightly test-engines` runs all that is slow.
#
#   PYTHON=python3.12          the interpreter (3.11 or newer)
#   VENV=.venv                 the folder of the virtual environment
#   PIP_ARGS="…"               options of pip, for example the URL of a package index
#   DEMO_ARGS="seed=1 …"       settings of `quadriga demo`
#   TEST_ARGS="-k name -x"     options of pytest
#   TEST_WORKERS=0             processes of pytest; 0: this one, for a debugger
#   BENCH_ARGS="--quick"       options of the benchmarks, for example --peer-python
#   ENGINES="vllm"             the rollout engines of `make engines` and `make test-engines`

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 2
BENCH_ARGS ?=
ENGINES ?= vllm sglang

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: demo test check lint types bench nightly docs engines test-engines clean distclean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	@$(BIN)/python -m quadriga.cli.main demo $(DEMO_ARGS)

# The tests start some hundred processes: each would compile the package again. The processes of
# pytest use all cores, so that torch has one thread.
FILES := --dist loadfile --max-worker-restart 1
test: lint types
	@env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) $(FILES) $(TEST_ARGS)

check: lint types
	@$(BIN)/python -m pytest tests/checks -k "not test_document_code and not test_call_files"

lint: $(INSTALLED_DEV)
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check .

types: $(INSTALLED_DEV)
	@$(BIN)/mypy --strict --no-error-summary -p quadriga

bench: $(INSTALLED_DEV)
	@for script in algorithms controller data_plane scale grpo_step group_balance train_step rollout weight_sync; do \
	  echo "benchmarks/$$script.py"; $(BIN)/python benchmarks/$$script.py $(BENCH_ARGS) || exit 1; done

nightly: NIGHTLY := -m nightly --timeout 3600 -o faulthandler_timeout=3700
nightly: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest $(NIGHTLY) -n $(TEST_WORKERS) $(FILES) --ignore tests/nightly $(TEST_ARGS)
	@$(BIN)/python -m pytest $(NIGHTLY) tests/nightly $(TEST_ARGS)

docs: $(INSTALLED)
	@$(PIP) -e '.[docs]'
	@$(BIN)/python -m mkdocs build --strict --site-dir build/site

engines:
	@PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" scripts/engines.sh $(ENGINES)

# The marks of the default run do not apply: the slow proofs of the real engines run here.
test-engines: engines
	@for engine in $(ENGINES); do echo "tests/real_engines with $$engine"; \
	  .venv-$$engine/bin/python -m pytest tests/real_engines -m '' \
	  --timeout 900 -o faulthandler_timeout=1000 $(TEST_ARGS) || exit 1; done

clean:
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Quadriga needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=…"; exit 1; }
	@echo "creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Quadriga and its dependencies (takes minutes the first time)"
	@$(PIP) -e .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(INSTALLED)
	@echo "installing the dependencies of the tests"
	@$(PIP) -e '.[dev,docs,agents,math,lora,megatron,vision]'
	@touch $@
