# The two commands: `make demo` and `make test`. PYTHON=python3.12 picks the interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format

demo: .venv/installed
	$(BIN)/ablate run demo

test: check
	$(BIN)/pytest -n auto

check: .venv/installed-test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright

format: .venv/installed-test
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
