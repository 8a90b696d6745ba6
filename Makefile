# Two words do everything: `make demo`, `make test`. The rest is below.
#
#   PYTHON=python3.12          another interpreter (3.11 or newer)
#   VENV=.venv                 where the environment lies
#   PIP_ARGS="…"               anything for pip, an index of one's own for instance
#   DEMO_ARGS="seed=1 …"       settings of `quadriga demo`
#   TEST_ARGS="-k name -x"     anything for pytest
#   BENCH_ARGS="--quick"       anything for the benchmarks: --peer-python of verl's environment

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
PUBLIC := $(foreach room,errors config protocol algorithms observability single_controller,-p quadriga.$(room))

.PHONY: demo test check lint types bench nightly clean distclean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	@$(BIN)/python -m quadriga.cli.main demo $(DEMO_ARGS)

test: lint types
	@$(BIN)/python -m pytest $(TEST_ARGS)

check: lint types
	@$(BIN)/python -m pytest tests/checks

lint: $(INSTALLED_DEV)
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --quiet --check .

types: $(INSTALLED_DEV)
	@$(BIN)/mypy --strict --no-error-summary $(PUBLIC)

bench: $(INSTALLED_DEV)
	@for script in algorithms controller data_plane; do \
	  echo "benchmarks/$$script.py"; $(BIN)/python benchmarks/$$script.py $(BENCH_ARGS) || exit 1; done

nightly: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest -m nightly --timeout 3600 $(TEST_ARGS)

clean:
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Quadriga needs Python 3.11 or newer, and $(PYTHON) is not; set PYTHON=…"; exit 1; }
	@echo "making the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Quadriga and what it needs (minutes the first time)"
	@$(PIP) -e .
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(INSTALLED)
	@echo "installing what the tests need"
	@$(PIP) -e '.[dev,math,lora]'
	@touch $@
