# Two commands do everything on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOOPS := $(wildcard src/lmdp/gradients/compiled/*.[ch])

.PHONY: demo test test-all sanitize bench docs wheel fmt clean

$(INSTALLED): pyproject.toml constraints.txt $(LOOPS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"lmdp needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## which layers leak, and what private training does about it: about two minutes, ends with a report
	$(BIN)/lmdp demo

test: $(INSTALLED)  ## lint, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal -q -m "not slow" tests/device
	$(BIN)/python -m pytest -n auto --dist worksteal -q -m "not slow" --ignore tests/device

test-all: $(INSTALLED)  ## the same, and the slow tests, the loops under sanitizers, and the documentation as a site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal -q tests/device
	$(BIN)/python -m pytest -n auto --dist worksteal -q --ignore tests/device
	$(MAKE) --no-print-directory sanitize
	$(MAKE) --no-print-directory docs

sanitize: $(INSTALLED)  ## the tests of the loops under the compiler's sanitizers: address, undefined behaviour, threads
	$(BIN)/python -m tests.gradients.sanitize

bench: $(INSTALLED)  ## time and memory of a private step against non-private SGD and Opacus, and how they grow
	$(BIN)/lmdp bench --out bench
	$(BIN)/lmdp bench --growth --out bench

docs: $(INSTALLED)  ## the documentation as a site, in site/; its extra is installed once, and nothing else is fetched
	@$(BIN)/python -c 'import mkdocstrings, material' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

wheel:  ## wheel and sdist, each installed in an empty environment and tried
	$(PYTHON) tests/smoke.py

fmt: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
