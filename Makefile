# make run    install what is missing, start the platform, see a model answer; Ctrl-C stops it
# make test   install what is missing, then everything that CI runs
SHELL := bash
.DEFAULT_GOAL := help

# The interpreter to build .venv with: 3.11 to 3.13. Empty finds one.
export PYTHON ?=
# Where torch comes from when no wheel lies on this machine; the default is PyTorch's builds without CUDA.
export TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# A folder with torch wheels, looked at first.
export TORCH_WHEELS ?=

BIN := .venv/bin
SOURCES := brokers producers workers compose tests
INSTALLED := .venv/.installed

.PHONY: help run test check bench faults system model clean distclean

help:
	@grep -hE '^# make ' $(MAKEFILE_LIST) | cut -c3-

run: model
	@$(BIN)/lingbot up --demo

test: check model
	$(BIN)/python -m pytest -m "not faults"

# make check  linters and types
check: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

# make bench  the benchmarks, as tables
bench: model
	$(BIN)/python -m tests.benchmarks

# make faults  processes are killed on purpose, for 40 minutes; WRITE=docs/faults.md keeps the table
faults: model
	$(BIN)/python -m pytest tests/faults -k "not short" $(if $(WRITE),--faults-write $(WRITE))

system:
	@compose/bootstrap/system.sh

$(INSTALLED): pyproject.toml constraints.txt | system
	@compose/bootstrap/venv.sh
	@touch $@

model: $(INSTALLED)
	@compose/bootstrap/model.sh

# make clean  stop the platform, drop the environment and the caches; data and models stay
clean:
	@if [[ -x $(BIN)/lingbot ]]; then $(BIN)/lingbot down; fi
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# make distclean  and the data and models too
distclean: clean
	rm -rf .lingbot
