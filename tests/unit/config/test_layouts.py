"""Shipped layouts and recipes fit their machines, and a copy of one with a fault is refused with both numbers and a fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.description import describe
from megatron_dapo.cli.main import app
from megatron_dapo.config import ConfigError
from megatron_dapo.config.derive import derive
from megatron_dapo.models.config_json import planned_directory, read_architecture
from megatron_dapo.plan.memory import num_parameters, run_memory
from megatron_dapo.plan.search import recomputations
from megatron_dapo.plan.weight_sync import sync_traffic
from megatron_dapo.rounding import GIB
from megatron_dapo.run.plan import Machines, Plan, make_plan
from tests.unit.config.architectures import DENSE, write_model
from tests.unit.plan.models import MODELS, size_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DEFAULT = Machines()
ROOM = 5 * GIB  # Every layout leaves this much of a GPU.
LARGE_NODES = {"colocated_1node_32b": 2000.0}  # GiB of host memory; 1,000 are too little
SMALL_NODES = {"lora_1node_1gpu_7b": 1}  # GPUs; 8 are too many
LAYOUTS = sorted((EXAMPLES / "layouts").glob("*.toml"))
SHIPPED = LAYOUTS + sorted((EXAMPLES / "recipes").glob("*.toml"))
# Weights and fp32 gradients are larger than the GPUs of a node: no node can hold a replica, and each sync brings it the rest.
LARGER_THAN_A_NODE = {"colocated_64nodes_235b_a22b"}


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    for name, document in MODELS.items():
        write_model(tmp_path / name, document)
    (tmp_path / "data.jsonl").write_text("{}\n")
    return tmp_path


def inputs_of(layout: Path, inputs: Path) -> list[str]:
    """Overrides that name a model of the layout's size and data; what the layout says of them is only a name."""
    data = f"['{inputs / 'data.jsonl'}']"
    teacher = f'distillation.teachers=[{{path = "{inputs / "32B"}"}}]'
    return [
        f"model.path={inputs / size_of(layout)}",
        *(f"data.{files}={data}" for files in ("train_paths", "eval_paths")),
        *([teacher] if layout.stem.startswith("distill") else []),
    ]


def plan_of(layout: Path, inputs: Path, machines: Machines = DEFAULT, overrides: Sequence[str] = ()) -> Plan:
    machines = replace(machines, host_gib=LARGE_NODES.get(layout.stem, machines.host_gib))
    if layout.stem in SMALL_NODES:
        machines = replace(machines, gpus_per_node=SMALL_NODES[layout.stem])
    return make_plan(layout, [*inputs_of(layout, inputs), *overrides], None, None, machines)


@pytest.mark.parametrize("layout", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_layout_passes_without_a_warning_and_prints_its_figures(layout: Path, inputs: Path) -> None:
    plan = plan_of(layout, inputs)
    text = "\n".join(describe(plan))
    assert "warning" not in text
    for pattern in (
        rf"machines: \d+ nodes? of {SMALL_NODES.get(layout.stem, 8)} GPUs?",
        r"engines: \d+ SGLang servers",
        r"KV cache of an engine: \d+ tokens",
        r"memory of a GPU: while training [\d.]+ GiB, while engines generate [\d.]+ GiB",
        r"host memory of a node: [\d.]+ GiB",
    ):
        assert re.search(pattern, text), text
    config = plan.loaded.config
    memory = run_memory(config, plan.architecture, plan.num_processes, plan.cluster)
    assert config.sglang.max_running_requests * config.longest_sequence // 4 <= memory.engine_memory.kv_tokens
    assert max(memory.trainer, memory.engine) <= plan.cluster.gpu_bytes - ROOM
    if config.sglang.placement == "colocated":
        assert config.sglang.servers_per_node * config.sglang.tp_size == plan.cluster.gpus_per_node
    assert memory.num_engines == plan.cluster.num_nodes * config.sglang.servers_per_node


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_a_layout_recomputes_no_more_than_it_must(layout: Path, inputs: Path) -> None:
    """To leave the room, besides the slack that the plan counts."""
    plan = plan_of(layout, inputs)
    config = plan.loaded.config
    kind = config.model.recompute_granularity, config.megatron.get("recompute_modules")
    base = config.model_copy(
        update={"megatron": {field: value for field, value in config.megatron.items() if field != "recompute_modules"}}
    )
    for settings in recomputations(base, plan.architecture):
        tried = derive(base, settings)
        memory = run_memory(tried, plan.architecture, plan.num_processes, plan.cluster)
        if memory.trainer <= plan.cluster.gpu_bytes - ROOM:
            break
    assert kind == (settings["model.recompute_granularity"], settings.get("megatron.recompute_modules"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda path: path.stem)
def test_a_weight_sync_of_a_colocated_layout_stays_on_its_nodes(layout: Path, inputs: Path) -> None:
    plan = plan_of(layout, inputs)
    config = plan.loaded.config
    traffic = sync_traffic(config, plan.architecture, plan.num_processes, plan.cluster)
    if layout.stem in LARGER_THAN_A_NODE:
        weights_and_gradients = (2 + 4) * num_parameters(plan.architecture)
        assert weights_and_gradients > plan.cluster.gpus_per_node * plan.cluster.gpu_bytes
    elif config.sglang.placement == "colocated":
        assert traffic.between_nodes == 0
    # Context ranks with packed sequences never ran on GPUs.
    assert config.parallel.cp_size == 1


def test_layouts_for_1_2_16_and_64_nodes_are_shipped() -> None:
    assert {re.search(r"_(\d+)nodes?", path.stem)[1] for path in LAYOUTS} == {"1", "2", "16", "64"}


# Layout, settings of the fault as TOML, and words of the refusal: what, both numbers, the fix. Machines if not the layout's own.
FAULTS: dict[str, tuple[Any, ...]] = {
    "loopback": (
        "colocated_16nodes",
        '[sglang]\nhost = "127.0.0.1"',
        ("sglang.host = '127.0.0.1'", "num_nodes = 16", 'set sglang.host = "auto"'),
    ),
    "loopback by name in a job of two nodes": (
        "colocated_2nodes",
        '[sglang]\nhost = "localhost"',
        ("sglang.host = 'localhost'", "num_nodes = 2"),
        Machines(num_nodes=2),
    ),
    "a URL on loopback": (
        "disaggregated_16nodes",
        '[sglang]\nurls = ["http://node1:30000", "http://127.0.0.1:30000"]\napi_key_file = "key"',
        ("http://127.0.0.1:30000", "num_nodes = 16", "set sglang.urls to addresses that every node reaches"),
        Machines(num_nodes=16),
    ),
    "nothing is offloaded": (
        "colocated_16nodes",
        '[model]\noffload = "none"',
        ("generating_gib = 9", "gpu_gib = 79.0", 'set model.offload = "all"'),
    ),
    "cache of six sequences": (
        "colocated_16nodes",
        "[sglang]\ntp_size = 2\nservers_per_node = 4\nmem_fraction_static = 0.6",
        ("kv_tokens = 12", "fewest_sequences = 8", "sequence_tokens = 22528", "set sglang.tp_size = 4"),
    ),
    "cache of no sequence": (
        "colocated_1node",
        "[sglang]\nmem_fraction_static = 0.2",
        ("kv_tokens = 2", "sequence_tokens = 22528", "raise sglang.mem_fraction_static"),
    ),
    "deadline of a request": (
        "colocated_16nodes",
        "[sglang]\nrequest_timeout_seconds = 300.0",
        ("sglang.request_timeout_seconds = 300.0", "response_seconds = 6", "set sglang.request_timeout_seconds = 1"),
    ),
    "deadline of a wait": (
        "disaggregated_16nodes",
        "[run]\nwait_timeout_seconds = 600.0",
        ("run.wait_timeout_seconds = 600.0", "response_seconds = 8", "set run.wait_timeout_seconds = 1"),
    ),
    "deadline of a weight sync": (
        "colocated_16nodes",
        "[sglang]\nweight_sync_timeout_seconds = 5.0",
        ("sglang.weight_sync_timeout_seconds = 5.0", "sync_seconds = 3", "or more"),
    ),
    "32B trainer on one node": (
        "colocated_2nodes",
        "[parallel]\npp_size = 1\nnum_processes = 8",
        ("trainer_gib = 9", "gpu_gib = 79.0", "cut the model over more processes"),
    ),
    "32B trainer on half a node": (
        "disaggregated_16nodes",
        "[parallel]\npp_size = 1\nnum_processes = 4",
        ("trainer_gib = 17", "gpu_gib = 79.0", "parallel.pp_size"),
    ),
    "servers of one GPU for 32B": (
        "colocated_16nodes",
        "[sglang]\ntp_size = 1\nservers_per_node = 8\nmem_fraction_static = 0.6",
        ("engine_weights_gib = 61.0", "static_gib = 46.5", "set sglang.tp_size = 2 or more"),
    ),
    "gate that a healthy bfloat16 run does not pass": (
        "colocated_16nodes",
        "[mismatch]\nstep0_max_mean_abs = 0.02",
        ("mismatch.step0_max_mean_abs = 0.02", "set mismatch.step0_max_mean_abs = 0.05", "mismatch.alarm = 0.02 warns of less"),
    ),
    "a server over two nodes": (
        "colocated_16nodes",
        "[sglang]\ntp_size = 16\nservers_per_node = 1",
        ("sglang.tp_size = 16", "gpus_per_node = 8", "set sglang.nodes_per_server = 2 with disaggregated servers"),
    ),
    "drafts on CPUs": (
        "colocated_16nodes",
        '[sglang]\ndrafting = "history"\nenable_deterministic_inference = false\nattention_backend = "triton"',
        ("sglang.drafting = 'history'", "SGLang verifies drafts greedily", 'set sglang.drafting = "off"'),
        Machines(num_nodes=16, gpus_per_node=0),
    ),
    "servers over nodes that do not fill them": (
        "disaggregated_16nodes",
        "[sglang]\ntp_size = 8\nnodes_per_server = 2",
        ("server_nodes = 13", "set sglang.nodes_per_server = 1, or run the policy on 14 nodes"),
        Machines(num_nodes=13),
    ),
    "servers beyond the GPUs of a node": (
        "colocated_16nodes",
        "[sglang]\nservers_per_node = 3",
        ("sglang.servers_per_node = 3", "sglang.tp_size = 4", "gpus_per_node = 8", "set sglang.servers_per_node = 2"),
    ),
    "servers on the trainer's GPUs": (
        "disaggregated_16nodes",
        "[sglang]\nservers_per_node = 1",
        ("processes_per_node = 8", "gpus_per_node = 8", "4 trainer processes a node, on 16 nodes"),
        Machines(num_nodes=8),
    ),
    "more processes than GPUs": (
        "colocated_16nodes",
        "",
        ("processes = 128", "num_nodes = 2", "gpus_per_node = 8", "on 16 nodes"),
        Machines(num_nodes=2),
    ),
    "nodes that do not divide the processes": (
        "colocated_2nodes",
        "",
        ("processes = 16", "num_nodes = 3", "run on 2 nodes"),
        Machines(num_nodes=3),
    ),
    "smaller GPUs": ("colocated_2nodes", "", ("trainer_gib = 71.9", "gpu_gib = 39.5"), Machines(gpu_gib=39.5)),
    "a node of 256 GiB": (
        "colocated_2nodes",
        "",
        ("node_gib = 644.3", "host_gib = 256.0", "start fewer trainer processes a node"),
        Machines(host_gib=256.0),
    ),
    "verifiers beyond a node's memory": (
        "colocated_16nodes",
        "[reward]\nnum_workers = 64\nmemory_limit_mb = 16384",
        ("node_gib = 1", "host_gib = 1000.0", "set reward.num_workers = 4"),
    ),
    "critic that stays": (
        "vapo_16nodes",
        '[critic]\noffload = "none"',
        ("generating_gib = ", 'set critic.offload = "all"'),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_with_a_fault_is_refused(fault: str, inputs: Path) -> None:
    name, settings, words, *machines = FAULTS[fault]
    original = EXAMPLES / "layouts" / f"{name}.toml"
    plan_of(original, inputs)
    copy = inputs / "copy.toml"
    copy.write_text(f'base = "{original}"\n{settings}\n')
    with pytest.raises(ConfigError) as refused:
        make_plan(copy, inputs_of(original, inputs), None, None, *(machines or [DEFAULT]))
    for word in words:
        assert word in refused.value.with_rules()


def test_what_works_but_not_well_is_a_warning(inputs: Path) -> None:
    layout = EXAMPLES / "layouts" / "colocated_16nodes.toml"
    queue = "\n".join(describe(plan_of(layout, inputs, overrides=["sglang.max_running_requests=512"])))
    assert "warning: requests will queue: 512 responses" in queue and "an engine holds 56" in queue
    apart = "\n".join(
        describe(plan_of(layout, inputs, Machines(num_nodes=32, gpus_per_node=4), ["sglang.servers_per_node=1"]))
    )
    assert "parallel.tp_size = 8, but 4 trainer processes a node; lower it to 4" in apart


def test_a_run_on_cpus_has_no_rule_about_gpus(inputs: Path) -> None:
    plan = plan_of(
        EXAMPLES / "layouts" / "colocated_16nodes.toml", inputs, Machines(num_nodes=16, gpus_per_node=0), ["run.seed=1"]
    )
    assert "16 nodes without GPUs" in "\n".join(describe(plan))


@pytest.mark.parametrize("layout", SHIPPED, ids=lambda path: path.stem)
def test_a_dry_run_without_inputs_needs_none(layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    host = ["--host-memory", "2000"] if layout.stem in LARGE_NODES else []
    named = str(layout.relative_to(EXAMPLES.parent))
    result = CliRunner().invoke(app, ["train", named, "--dry-run", "--no-inputs", *host])
    assert result.exit_code == 0, result.output
    assert "from the config.json that comes with the package" in result.stdout
    assert re.search(r"disk of the checkpoints: [\d.]+ [GT]B = .*--free-disk GIB", result.stdout)
    # Processes that start here read them.
    refused = CliRunner().invoke(app, ["train", named, *host])
    assert refused.exit_code == 2 and "model.path: expected a Hugging Face directory that exists" in refused.output


# Parameters in billions, with and without the embeddings, by the cards of huggingface.co/Qwen.
CARDS = {
    "Qwen2.5-7B": (7.61, 6.53),
    "Qwen2.5-14B": (14.7, 13.1),
    "Qwen2.5-32B": (32.5, 31.0),
    "Qwen3-30B-A3B-Base": (30.5, 29.9),
    "Qwen3-235B-A22B": (235, 234),
}


@pytest.mark.parametrize("name", CARDS)
def test_shipped_configurations_have_the_parameters_of_the_models_cards(name: str) -> None:
    architecture = read_architecture(planned_directory(Path(name)))
    total = num_parameters(architecture) / 1e9
    embeddings = 2 * architecture.vocab_size * architecture.hidden_size / 1e9
    assert total == pytest.approx(CARDS[name][0], rel=0.01) and total - embeddings == pytest.approx(CARDS[name][1], rel=0.01)


def test_a_model_that_no_recipe_trains_needs_its_configuration(tmp_path: Path) -> None:
    layout = EXAMPLES / "layouts" / "colocated_16nodes.toml"
    arguments = ["train", str(layout), "--dry-run", "--no-inputs", "--set", f"model.path={tmp_path / 'Own-32B'}"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2 and f"{tmp_path / 'Own-32B'}: no config.json; give" in refused.output
    write_model(tmp_path / "Own-32B", MODELS["32B"])
    assert CliRunner().invoke(app, arguments).exit_code == 0


def dry_run(layout: str, inputs: Path, *arguments: str) -> Any:
    path = EXAMPLES / "layouts" / f"{layout}.toml"
    overrides = [part for override in inputs_of(path, inputs) for part in ("--set", override)]
    # Checkpoints of these models need more than a machine that only plans has.
    disk = ["--free-disk", "50000"]
    return CliRunner().invoke(app, ["train", str(path), *overrides, *disk, "--no-inputs", *arguments])


def test_the_command_learns_the_nodes_from_flags_and_from_slurm(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert "machines: 2 nodes of 8 GPUs of 79 GiB" in dry_run("colocated_2nodes", inputs, "--dry-run").stdout
    larger = dry_run("colocated_2nodes", inputs, "--dry-run", "--nodes", "2", "--gpu-memory", "140")
    assert "machines: 2 nodes of 8 GPUs of 140 GiB" in larger.stdout
    small = dry_run("colocated_2nodes", inputs, "--dry-run", "--host-memory", "256")
    assert small.exit_code == 2 and "node_gib = 644.3" in small.output
    refused = dry_run("colocated_2nodes", inputs, "--dry-run", "--nodes", "4", "--gpus-per-node", "2")
    assert refused.exit_code == 2 and "processes = 16, num_nodes = 4, gpus_per_node = 2" in refused.output
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "h100:4")
    refused = dry_run("colocated_2nodes", inputs, "--dry-run")
    assert refused.exit_code == 2 and "processes = 16, num_nodes = 1, gpus_per_node = 4" in refused.output


def test_a_start_on_this_machine_takes_no_number_of_nodes(inputs: Path) -> None:
    refused = dry_run("colocated_2nodes", inputs, "--nodes", "2")
    assert refused.exit_code == 2 and "--nodes: only with --dry-run" in refused.output


def test_processes_that_a_layout_leaves_open_fill_the_machines(inputs: Path) -> None:
    recipe = inputs / "open.toml"
    recipe.write_text(
        f'[model]\npath = "{write_model(inputs / "tiny", DENSE)}"\n[data]\ntrain_paths = ["data.jsonl"]\n'
        "max_prompt_tokens = 16\n[rollout]\nmax_response_tokens = 32\n[parallel]\ntp_size = 2\n"
    )
    for machines, processes in (
        (Machines(), 2),
        (Machines(num_nodes=2), 16),
        (Machines(num_nodes=2, num_tasks=4), 4),
        (Machines(num_nodes=1, gpus_per_node=0), 2),
    ):
        assert make_plan(recipe, [], None, None, machines).num_processes == processes


def test_a_dry_run_refuses_checkpoints_that_do_not_fit(inputs: Path) -> None:
    small = dry_run("colocated_2nodes", inputs, "--dry-run", "--free-disk", "500")
    assert small.exit_code == 2 and "free = '537 GB'" in small.output and "lower checkpoint.keep" in small.output
    assert "disk of the checkpoints: " in dry_run("colocated_2nodes", inputs, "--dry-run").stdout
