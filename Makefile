# make quickstart [LAYOUT=tp1pp2] [ARGS="--set run.seed=1"]   train the shipped example
# make test                                                    the whole test suite
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK := requirements/cpu-py311.txt
PIP := .venv/bin/python -m pip --disable-pip-version-check install --quiet
# One thread a process: the processes share the cores, and tiny matrices lose by being split.
RUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: quickstart test clean

# torch comes first and alone: its CPU build lies on an index of its own, and no other package may choose one.
.venv/.installed: $(LOCK) setup.py
	$(PYTHON) -m venv .venv
	$(PIP) --no-deps --retries 1 $(TORCH) --extra-index-url $(TORCH_INDEX)
	$(PIP) -r $(LOCK)
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv: .venv/.installed

quickstart: .venv
	$(RUN) .venv/bin/megatron-dapo train examples/quickstart/quickstart.toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)

# Unit tests share the cores; tests that start processes of their own run one after the other.
test: .venv
	@status=0; \
	$(RUN) .venv/bin/python -m pytest -q tests/unit -n 2 || status=1; \
	$(RUN) .venv/bin/python -m pytest -q tests --ignore=tests/unit || status=1; \
	exit $$status

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .hypothesis
