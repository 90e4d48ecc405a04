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

.PHONY: help run test test-vllm check bench bench-engine faults system model clean distclean

help:
	@grep -hE '^# make ' $(MAKEFILE_LIST) | cut -c3-

run: model
	@$(BIN)/lingbot up --demo

test: check model
	$(BIN)/python -m pytest -m "not faults"

# make test-vllm  the tests of the engines again, vLLM among them, in an environment of its own (3.6 GB)
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/engines -m vllm

# make check  linters and types
check: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

# make bench  the benchmarks, as tables
bench: model
	$(BIN)/python -m tests.benchmarks

# make bench-engine  the engine beside others on one core, for half an hour; WRITE=docs/engine.md keeps the tables, ARGS=--quick
bench-engine: model .venv/.bench-installed
	$(BIN)/python -m tests.benchmarks.engine $(ARGS) $(if $(WRITE),--write $(WRITE))

# make faults  processes are killed on purpose, for 40 minutes; WRITE=docs/faults.md keeps the table
faults: model
	$(BIN)/python -m pytest tests/faults -k "not short" $(if $(WRITE),--faults-write $(WRITE))

.venv-vllm/.installed: pyproject.toml compose/bootstrap/vllm-constraints.txt | system
	@compose/bootstrap/vllm.sh
	@touch $@

.venv/.bench-installed: tests/benchmarks/engine/requirements.txt compose/bootstrap/bench.sh | $(INSTALLED)
	@compose/bootstrap/bench.sh
	@touch $@

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
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# make distclean  and the data and models too
distclean: clean
	rm -rf .lingbot
