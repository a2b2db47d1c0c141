# The two commands: `make demo` and `make test`. PYTHON=python3.12 picks the interpreter.
PYTHON ?= python3
BIN := .venv/bin
# One process more than there are cores: tests that wait for another process leave one free.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: demo test check format docs

demo: .venv/installed
	$(BIN)/ablate run demo

# WHICH selects tests: WHICH="-m 'slow or not slow'" runs those that take minutes, too.
# The types are checked beside the tests; either may fail the whole. Python keeps what it compiles,
# which the processes of the tests would each do again.
test: .venv/installed-test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	@$(BIN)/pyright > .venv/types.log 2>&1 & types=$$!; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(WORKERS) $(WHICH); tests=$$?; \
	wait $$types; failed=$$?; cat .venv/types.log; \
	exit $$((tests ? tests : failed))

check: .venv/installed-test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/python -m benchmarks.budget

format: .venv/installed-test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The documentation as a site, in build/site; it opens without a network.
docs: .venv/installed-test
	$(BIN)/mkdocs build --strict

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,bench,docs]'
	touch $@
