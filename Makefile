# Everything here works from an empty clone: the first target that needs it builds .venv, the second run is offline.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)
BIN := .venv/bin
# Also the stamp: the copy of pyproject.toml that the environment was installed from.
INSTALLED := .venv/installed.toml
WITH_DOCS := .venv/installed-docs.toml

.PHONY: help venv demo test test-slow check format docs clean

help:
	@echo "make demo       set up, then fit the kink data and write a report (minutes)"
	@echo "make test       set up, then run the quick test suite"
	@echo "make test-slow  the long tests too"
	@echo "make check      format, lint, types and the quick tests, as a submission needs them"
	@echo "make format     let ruff mend what it can"
	@echo "make docs       set up, then build the documentation into site/, warnings being errors"
	@echo "make venv       set up only: .venv with the package and its tools"
	@echo "make clean      remove .venv, caches and builds"

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@if cmp -s pyproject.toml $@; then touch $@; exit 0; fi; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "gpssm needs Python 3.11 or newer, and '$(if $(PYTHON),$(PYTHON),python3)' is not:" \
			"install one, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	rm -rf .venv; \
	"$(PYTHON)" -m venv .venv || { \
		echo "Python could not create .venv; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
	echo "installing gpssm and its tools into .venv (a few minutes, once)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' || { \
		echo "pip could not install gpssm's dependencies: see above; a first run needs a package index" >&2; exit 1; }; \
	cp pyproject.toml $@

demo: venv
	@$(BIN)/gpssm demo

test: venv
	@$(BIN)/python -m pytest -n 2

test-slow: venv
	@$(BIN)/python -m pytest -n 2 -m "slow or not slow"

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python -m pytest -n 2

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(WITH_DOCS): $(INSTALLED)
	@echo "installing what builds the documentation into .venv (once)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs]' || { \
		echo "pip could not install MkDocs: see above; a first run needs a package index" >&2; exit 1; }; \
	cp pyproject.toml $@

docs: $(WITH_DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf .venv build dist site .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
