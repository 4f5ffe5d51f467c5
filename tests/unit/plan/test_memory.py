"""Bytes of weights, caches and activations: parameters against the layouts of every tensor, activations against what
autograd really keeps, whole models against megatron-core's published estimate."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron_dapo.bridge.sources import expected_layouts
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.packing import pack
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.memory import (
    checkpoint_bytes,
    chunks_in_flight,
    engine_weight_bytes,
    layer_bytes,
    model_memory,
    num_parameters,
    optimizer_share,
    padded_vocabulary,
    rank_parameters,
    run_memory,
    stage_memory,
    trainer_cut,
)
from megatron_dapo.plan.memory.activations import LayerBytes
from megatron_dapo.plan.memory.batch import TOKEN_BYTES
from megatron_dapo.rounding import GIB
from tests.unit.config.architectures import DENSE, EXPERTS, GEMMA3, GEMMA3_4B, QWEN_7B, QWEN_14B, QWEN_32B
from tests.unit.parallel.test_packing import make_sample
from tests.unit.plan.models import colocated, run_of

TIED = {**DENSE, "tie_word_embeddings": True}
SEQUENCE = {"tp_size": 2, "sequence_parallel": True}


def layout_of(parallel: ParallelConfig, processes: int) -> ParallelLayout:
    return ParallelLayout(
        processes,
        tensor=parallel.tp_size,
        pipeline=parallel.pp_size,
        virtual_pipeline=parallel.vpp_size,
        context=parallel.cp_size,
        expert=parallel.ep_size,
        expert_tensor=parallel.etp_size or None,
        sequence_parallel=parallel.sequence_parallel,
    )


def kind_of(name: str) -> str:
    if ".experts." in name:
        return "experts"
    is_vocabulary = "embedding" in name or name.endswith("output_layer.weight")
    return "vocabulary" if is_vocabulary else "dense"


@pytest.mark.parametrize(
    ("document", "sizes", "processes"),
    [
        (DENSE, {}, 1),
        (TIED, {"tp_size": 2}, 2),
        (
            {**DENSE, "architectures": None, "model_type": "qwen2", "head_dim": None},
            {"tp_size": 2, "pp_size": 2, "cp_size": 2},
            8,
        ),
        (TIED, {"pp_size": 4}, 4),
        (DENSE, {"pp_size": 2, "vpp_size": 2}, 4),
        ({**DENSE, "architectures": None, "model_type": "llama", "head_dim": None}, {"tp_size": 4}, 4),
        (EXPERTS, {"ep_size": 8}, 8),
        (EXPERTS, {**SEQUENCE, "ep_size": 4, "etp_size": 1}, 8),
        (EXPERTS, {**SEQUENCE, "pp_size": 2, "ep_size": 2}, 16),
        (GEMMA3, {"tp_size": 2, "pp_size": 2}, 4),
    ],
)
@pytest.mark.parametrize("has_value_head", [False, True])
def test_parameters_of_every_rank_are_those_of_the_layout(
    document: dict[str, Any], sizes: dict[str, Any], processes: int, has_value_head: bool
) -> None:
    parallel, model = ParallelConfig(**sizes), parse_architecture(document)
    architecture = model.with_value_head() if has_value_head else model
    layout = layout_of(parallel, processes)
    tensors = megatron_layout(architecture, layout, torch.bfloat16)
    for rank in range(processes):
        parts = {"experts": 0, "vocabulary": 0, "dense": 0}
        for name, spec in tensors.local_specs(rank).items():
            is_head = has_value_head and "output_layer" in name
            parts["dense" if is_head else kind_of(name)] += spec.num_elements
        found = rank_parameters(model, parallel, layout.coordinates(rank).pipeline, has_value_head)
        assert vars(found) == parts, f"rank {rank} of {layout.describe()}"


@pytest.mark.parametrize("has_value_head", [False, True])
@pytest.mark.parametrize("document", [DENSE, TIED, EXPERTS, GEMMA3])
def test_elements_of_the_whole_model_are_counted_once(document: dict[str, Any], has_value_head: bool) -> None:
    facts = parse_architecture(document)
    exact = (facts.with_value_head() if has_value_head else facts).num_parameters
    assert num_parameters(facts, has_value_head) == exact
    assert checkpoint_bytes(facts, "bfloat16", has_value_head) == exact * (2 + 4 + 8)
    assert checkpoint_bytes(facts, "float32", has_value_head) == exact * (4 + 8)


@pytest.mark.parametrize(
    ("document", "tensor", "expert"),
    [
        (DENSE, 1, 1),
        (TIED, 2, 1),
        (DENSE, 8, 1),
        ({**DENSE, "architectures": None, "model_type": "qwen2", "head_dim": None, "hidden_size": 1024}, 2, 1),
    ]
    + [(EXPERTS, 2, 1), (EXPERTS, 4, 2), ({**EXPERTS, "tie_word_embeddings": True}, 1, 1), (GEMMA3, 2, 1)],
)
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_weights_of_a_server_are_those_of_its_layout(
    document: dict[str, Any], tensor: int, expert: int, quantization: str
) -> None:
    model = parse_architecture(document)
    plain = sglang_layout(model, tensor, torch.bfloat16, expert_parallel=expert, device="cuda")
    layout = expected_layouts(quantization, plain)[1]
    expected = {sum(spec.num_bytes for spec in layout.local_specs(rank).values()) for rank in range(tensor)}
    found = engine_weight_bytes(model, tensor, expert, "bfloat16", quantization == "fp8")
    assert {found} == expected


@pytest.mark.parametrize(("document", "billions"), [(QWEN_7B, 7.616), (QWEN_14B, 14.770), (QWEN_32B, 32.764)])
def test_parameters_of_real_models_are_the_published_ones(document: dict[str, Any], billions: float) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**{name: value for name, value in document.items() if name != "torch_dtype"})
    with torch.device("meta"):
        exact = sum(parameter.numel() for parameter in Qwen2ForCausalLM(config).parameters())
    assert round(exact / 1e9, 3) == billions
    found = rank_parameters(parse_architecture(document), ParallelConfig())
    assert found.total == exact, "152,064 rows need no padding on one rank"


def test_parameters_of_a_model_with_a_vision_tower_are_the_published_ones() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    with torch.device("meta"):
        exact = sum(p.numel() for p in Gemma3ForConditionalGeneration(Gemma3Config(**GEMMA3_4B)).parameters())
    facts = parse_architecture(GEMMA3_4B)
    padding = 64 * facts.hidden_size  # megatron-core's: 262,208 rows are no multiple of 128
    text = rank_parameters(facts, ParallelConfig()).total - padding
    assert (text, facts.vision_parameters) == (3_880_263_168, 419_816_304)
    assert text + facts.vision_parameters == exact


def core_estimate(document: dict[str, Any], parallel: ParallelConfig, data: int) -> float:
    """Bytes of weights, gradients and optimizer by Megatron-LM's megatron/training/theoretical_memory_usage.py."""
    hidden, layers = document["hidden_size"], document["num_hidden_layers"]
    ratio = document["num_key_value_heads"] / document["num_attention_heads"]
    attention = 2 * hidden * hidden * (1 + ratio)
    block = layers * (2 * hidden * (document["intermediate_size"] * 3 / 2 + 1) + attention) + hidden
    multiple = 128 * parallel.tp_size
    embedding = hidden * (-(-document["vocab_size"] // multiple) * multiple)
    most_loaded = (block / parallel.pp_size + embedding * (2 if parallel.pp_size == 1 else 1)) / parallel.tp_size
    return most_loaded * (6 + 12 / data)


@pytest.mark.parametrize("document", [QWEN_7B, QWEN_14B, QWEN_32B], ids=["7B", "14B", "32B"])
@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(1, 1, 1), (4, 1, 2), (4, 2, 8), (4, 4, 64)])
def test_state_of_a_trainer_rank_agrees_with_megatrons_estimate(
    document: dict[str, Any], tensor: int, pipeline: int, data: int
) -> None:
    config = run_of(parallel={"tp_size": tensor, "pp_size": pipeline})
    found = model_memory(config, parse_architecture(document), tensor * pipeline * data).state
    # The estimate has no biases and cuts norms over tensor ranks.
    assert found == pytest.approx(core_estimate(document, config.parallel, data), rel=1e-3)


def test_optimizer_is_shared_by_replicas_and_fp8_weights_are_kept_for_both_passes() -> None:
    experts = parse_architecture(EXPERTS)
    parallel = ParallelConfig(tp_size=2, sequence_parallel=True, ep_size=4, etp_size=1)
    held = rank_parameters(experts, parallel)
    assert optimizer_share(parallel, held, 8) == (held.dense + held.vocabulary) // 4 + held.experts // 2
    whole = parallel.model_copy(update={"use_distributed_optimizer": False})
    assert optimizer_share(whole, held, 8) == held.total
    dense = rank_parameters(parse_architecture(DENSE), ParallelConfig())
    plain, cached, alone = (
        stage_memory(run_of(precision=precision), parse_architecture(DENSE), 1, 0).weights
        for precision in ({}, {"recipe": "fp8_blockwise"}, {"recipe": "fp8_blockwise", "fp8_param": True})
    )
    assert plain == 2 * dense.total and cached == plain + 2 * dense.dense
    assert alone == 2 * dense.total
    full = stage_memory(run_of(model={"dtype": "float32"}), parse_architecture(DENSE), 1, 0)
    assert full.optimizer == 8 * dense.total, "an fp32 weight is its own main param"


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ranks_share_the_copy_of_a_checkpoint(dtype: str, distributed: bool) -> None:
    facts = parse_architecture(QWEN_7B)
    parallel = {"tp_size": 2, "pp_size": 2, "use_distributed_optimizer": distributed}
    config = run_of(model={"dtype": dtype}, parallel=parallel)
    stages = [stage_memory(config, facts, 16, stage) for stage in range(2)]
    # Eight ranks a stage: nothing twice, but for norms that the estimate gives to both tensor ranks.
    assert 8 * sum(stage.saved for stage in stages) == pytest.approx(checkpoint_bytes(facts, dtype), rel=1e-3)


@pytest.mark.parametrize(("mode", "times"), [("node", 2), ("peer", 4)])
def test_copies_in_memory_count_as_host_memory_up_to_their_limit(mode: str, times: int) -> None:
    facts, cluster = parse_architecture(QWEN_7B), Cluster(num_nodes=2)

    def host(**checkpoint: Any) -> int:
        return run_memory(run_of(parallel={"tp_size": 2}, checkpoint=checkpoint), facts, 16, cluster).host

    saved = model_memory(run_of(parallel={"tp_size": 2}), facts, 16).saved
    assert host(memory_copies=mode) - host() == times * 8 * saved, "eight ranks a node; two checkpoints during a save"
    assert host(memory_copies=mode, memory_copies_gib=1.0) - host() == GIB
    assert host(memory_copies_gib=1.0) == host()


# ---- activations


def layer_of(facts: ModelArchitecture, parallel: ParallelConfig, item: int) -> LayerBytes:
    """What Transformer Engine's layers keep of the first one."""
    return layer_bytes(facts.parts(0), facts.hidden_size, trainer_cut(parallel, item, "transformer_engine"))


def test_activations_of_a_layer_are_those_of_the_published_formula() -> None:
    """arXiv 2205.05198, equation 4 with separate heads for every key, an MLP without a gate, and dropout:
    34 sbh / t without the scores, of which 2 sbh are dropout's masks."""
    facts = parse_architecture(
        {**DENSE, "architectures": None, "head_dim": None, "model_type": "llama", "num_key_value_heads": 8}
    )
    hidden, inner = facts.hidden_size, facts.intermediate_size

    def scales(tensor: int, local: float) -> float:
        """Bytes that the published formula leaves out: an fp32 number of each norm, and of each head's softmax."""
        return 4 * (2 * local + facts.num_attention_heads // tensor)

    for tensor in (1, 2, 4):
        parallel = ParallelConfig(tp_size=tensor, sequence_parallel=tensor > 1)
        gate = 2 * inner // tensor  # bytes: the gated MLP keeps [gate; up], the published one keeps one
        published = (34 - 2) * hidden // tensor
        assert inner == 4 * hidden
        assert layer_of(facts, parallel, 2).whole - gate - scales(tensor, 1 / tensor) == published
    # Without sequence parallelism inputs and outputs of norms are whole on every rank: 10 + 24 / t, less the masks.
    whole = layer_of(facts, ParallelConfig(tp_size=4), 2).whole - 2 * inner // 4 - scales(4, 1)
    assert whole == (10 - 2 + 24 / 4) * hidden


def test_chunks_in_flight_follow_the_schedules() -> None:
    # 1F1B: stage s begins its backward passes after pp - s forward passes.
    assert [chunks_in_flight(ParallelConfig(pp_size=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    # Interleaved, the paper's penalty of 1 + (p - 1) / (p m) over the plain schedule, in chunks of half the size.
    assert chunks_in_flight(ParallelConfig(pp_size=4, vpp_size=2), 0) == 2 * 4 * (1 + 3 / 8)


def recomputed(granularity: str, **options: Any) -> Any:
    return run_of(model={"recompute_granularity": granularity}, megatron=options)


def test_recomputation_keeps_less_the_more_is_computed_again() -> None:
    facts = parse_architecture(QWEN_7B)
    kinds = {
        "none": recomputed("none"),
        "core attention": recomputed("selective"),
        "mlp": recomputed("selective", recompute_modules=["core_attn", "mlp"]),
        "half of the layers": recomputed("full", recompute_method="block", recompute_num_layers=14),
        "layers": recomputed("full"),
    }
    found = {name: stage_memory(config, facts, 1, 0).activations for name, config in kinds.items()}
    assert found["none"] > found["core attention"] > found["mlp"] > found["layers"]
    assert found["none"] > found["half of the layers"] > found["layers"]
    # Whole layers: the inputs of all, and one layer that is computed again.
    tokens, layer = kinds["layers"].training.micro_batch_tokens, layer_of(facts, ParallelConfig(), 2).whole
    assert found["layers"] == tokens * (28 * 2 * facts.hidden_size + layer - 2 * facts.hidden_size)
    assert found["none"] == tokens * 28 * layer


def test_buffers_of_overlapped_communication_stay_all_the_time() -> None:
    plain, overlapped = (
        run_memory(run_of(parallel=SEQUENCE, training={"micro_batch_tokens": 24576}, megatron=options), parse_architecture(QWEN_7B), 2, Cluster())
        for options in ({}, {"tp_comm_overlap": True})
    )
    for before, after in zip(plain.phases, overlapped.phases, strict=True):
        assert after.total - before.total == 12 * 24576 * QWEN_7B["hidden_size"] * 2


@pytest.mark.parametrize(("tokens", "peak"), [(512, "update"), (65536, "activations")])
def test_an_optimizer_on_the_host_is_on_the_device_in_pieces(tokens: int, peak: str) -> None:
    sections: dict[str, Any] = {"training": {"micro_batch_tokens": tokens}, "parallel": {"tp_size": 2}}
    here = run_of(**sections, data={"max_prompt_tokens": 1}, rollout={"max_response_tokens": tokens - 1})
    there = here.model_copy(update={"optimizer": here.optimizer.model_copy(update={"on_host": True})})
    whole, pieces = (model_memory(config, parse_architecture(QWEN_7B), 2) for config in (here, there))
    assert pieces.state == whole.weights + whole.gradients == whole.state - whole.optimizer
    vocabulary = rank_parameters(parse_architecture(QWEN_7B), here.parallel).vocabulary
    assert pieces.piece == 12 * vocabulary and vocabulary > 1 << 26  # embedding and head are the largest shards
    passes = whole.training - whole.state
    assert pieces.training == pieces.state + max(pieces.piece, passes) and peak in pieces.training_parts
    for offload, left in (("none", 0), ("optimizer", 0), ("all", whole.weights)):
        assert pieces.on_host(offload) == whole.optimizer + left and pieces.moved(offload) == left
        assert pieces.resident(offload) == min(pieces.state, whole.resident(offload))


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_phases_add_up_to_the_peaks_of_a_run(placement: str) -> None:
    servers = colocated(placement=placement, tp_size=2, servers_per_node=2)
    config = run_of(parallel=SEQUENCE, model={"offload": "all"}, **servers)
    memory = run_memory(config, parse_architecture(QWEN_7B), 4, Cluster())
    phases = {phase.phase: phase for phase in memory.phases}
    assert list(phases) == ["generate", "log_probs", "train", "weight_update", "checkpoint", "evaluation"]
    assert memory.trainer == phases["train"].total and memory.engine == phases["weight_update"].total
    parts, policy = phases["train"].parts, memory.policy
    assert sum(parts[name] for name in ("weights", "gradients", "main_params", "moments")) == policy.state
    assert parts["activations"] + parts["working"] + parts["head"] == policy.training - policy.state
    shared = placement == "colocated"
    assert {phase.device for phase in memory.phases} == ({"shared"} if shared else {"trainer", "engine"})
    assert ("engine_asleep" in parts) == shared == ("trainer" in phases["generate"].parts)
    assert phases["log_probs"].total < phases["train"].total > phases["checkpoint"].total


def test_frozen_models_have_weights_only_and_teachers_take_turns() -> None:
    def parts(phase: str, **sections: Any) -> dict[str, int]:
        config = run_of(parallel={"tp_size": 2}, model={"offload": "none"}, **sections)
        memory = run_memory(config, parse_architecture(QWEN_7B), 4, Cluster())
        return {**dict({one.phase: one for one in memory.phases}[phase].parts), "policy_weights": memory.policy.weights}

    def others(phase: str, **sections: Any) -> int:
        return parts(phase, **sections)["other_models"]

    weights = parts("train")["policy_weights"]
    assert others("train", algorithm={"kl_loss_coefficient": 0.1}) == weights
    teachers = [{"name": "one"}, {"name": "two"}, {"name": "served", "url": "http://host:1"}]
    stay = {"teachers": teachers}
    assert others("train", distillation=stay) == others("log_probs", distillation=stay) == 2 * weights
    turns = {"teachers": teachers, "offload": "all"}
    assert others("log_probs", distillation=turns) == weights
    rows = padded_vocabulary(QWEN_7B["vocab_size"], 2) // 2
    assert others("train", distillation=turns) == 2 * rows * QWEN_7B["hidden_size"] * 2
    assert parts("log_probs", distillation=turns)["forward"] == parts("log_probs")["forward"]


def test_each_rank_of_servers_that_draft_has_two_corpora_in_host_memory() -> None:
    def host(**fields: Any) -> int:
        servers = colocated(tp_size=2, servers_per_node=2, draft_corpus_tokens=1 << 20, **fields)
        return run_memory(run_of(**servers), parse_architecture(QWEN_7B), 4, Cluster()).host

    assert host(drafting="history") - host() == 4 * 2 * (1 << 30)


def saved_bytes(tokens: int) -> int:
    """Bytes that autograd keeps for one layer of transformers' model, by SDPA's memory-efficient form."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    document = {**DENSE, "num_hidden_layers": 1, "hidden_size": 512, "vocab_size": 8}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**document, attn_implementation="sdpa")).to(torch.float32)
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long)).last_hidden_state.sum()
    return sum(kept.values())


def test_activations_are_at_least_what_fused_kernels_must_keep_and_at_most_what_autograd_keeps() -> None:
    facts = parse_architecture({**DENSE, "num_hidden_layers": 1, "hidden_size": 512, "vocab_size": 8})
    tokens = 64
    formula = tokens * layer_of(facts, ParallelConfig(), 4).whole
    exact = saved_bytes(tokens)
    # Unfused norms, rotary embeddings and SiLU keep intermediates that fused kernels recompute.
    assert 0.45 * exact < formula < exact


@pytest.mark.parametrize(("num_experts", "item"), [(128, 1), (512, 2)])
def test_experts_of_the_responses_of_a_step_are_host_memory(num_experts: int, item: int) -> None:
    facts = parse_architecture({**EXPERTS, "num_experts": num_experts})

    def memory_of(replay: bool, oversample: float = 1.0, engine: str = "embedded") -> Any:
        rollout = {"routing_replay": replay, "oversample": oversample, "prompts_per_step": 8, "group_size": 4}
        config = run_of(
            rollout={**rollout, "max_response_tokens": 900, "engine": engine},
            parallel={"tp_size": 2, "pp_size": 2},
            data={"max_prompt_tokens": 100},
            sglang={"servers_per_node": 2, "tp_size": 4},
        )
        return run_memory(config, facts, 16, Cluster(num_nodes=2, gpus_per_node=8))

    choices = facts.num_layers * facts.num_experts_per_token
    a_response = 1000 * choices * item
    # All of them on rank 0, and on each of the node's 8 ranks those of one of 4 replicas.
    assert memory_of(True).host - memory_of(False).host == a_response * (32 + 8 * 8)
    assert memory_of(True, 1.5).host - memory_of(False, 1.5).host == a_response * (48 + 8 * 8)
    served = memory_of(True, engine="sglang")
    of_servers = 8 * served.engine_memory.kv_tokens * 4 * choices
    assert of_servers > 0
    assert served.host - memory_of(False, engine="sglang").host == a_response * (32 + 8 * 8) + of_servers


def test_supports_of_the_responses_of_a_step_are_host_memory() -> None:
    def host_of(top_k: int) -> int:
        rollout = {"top_k": top_k, "prompts_per_step": 8, "group_size": 4, "max_response_tokens": 900}
        config = run_of(rollout=rollout, parallel={"tp_size": 2, "pp_size": 2}, data={"max_prompt_tokens": 100})
        return run_memory(config, parse_architecture(QWEN_7B), 16, Cluster(num_nodes=2, gpus_per_node=8)).host

    assert host_of(50) - host_of(0) == 1000 * 4 * 50 * (32 + 8 * 8)


@pytest.mark.parametrize(
    ("implementation", "item"), [("auto", 2 + 4 / 64), ("triton_tuned", 2 + 4 / 64), ("te_fp8", 4)]
)
def test_kept_logits_are_counted_up_to_their_limit(implementation: str, item: float) -> None:
    def head(kept_gb: float, stage: int = 1) -> int:
        model = {"logprob_implementation": implementation, "logprob_kept_gb": kept_gb}
        config = run_of(model=model, parallel={"tp_size": 4, "pp_size": 2}, training={"micro_batch_tokens": 8192})
        return stage_memory(config, parse_architecture(QWEN_7B), 8, stage).head

    exact = int(8192 * (152064 / 4) * item)
    assert head(2.0) - head(0.0) == exact
    assert head(0.1) - head(0.0) == 10**8, "micro-batches with fewer tokens keep them"
    assert head(2.0, stage=0) == 0


def test_a_stage_with_more_layers_has_more_parameters_and_activations() -> None:
    even = ParallelConfig(pp_size=4)
    uneven = ParallelConfig(pp_size=4, first_stage_layers=13, last_stage_layers=19)
    model = parse_architecture(QWEN_32B)
    parameters = [[rank_parameters(model, one, stage) for stage in range(4)] for one in (even, uneven)]
    assert sum(one.dense for one in parameters[0]) == sum(one.dense for one in parameters[1])
    assert parameters[1][0].dense < parameters[0][0].dense < parameters[1][3].dense


# ---- NCCL and samples


def nccl(parallel: dict[str, Any], processes: int, document: dict[str, Any], cluster: Cluster) -> int:
    """Bytes of NCCL in a run of these processes, beyond those of one process, which has no group of two."""

    def communication(sizes: dict[str, Any], count: int) -> int:
        memory = run_memory(run_of(parallel=sizes), parse_architecture(document), count, cluster)
        return {phase.phase: phase for phase in memory.phases}["train"].parts["communication"]

    return communication(parallel, processes) - communication({}, 1)


def test_groups_take_what_others_measured() -> None:
    """verl pull request 6408: TP2 PP2 DP2 on 8 H100, 7 GB a rank dense and 9.5 GB with experts, with NCCL's defaults."""
    sizes, defaults = {"tp_size": 2, "pp_size": 2, "sequence_parallel": True}, Cluster(nvls=True)
    assert nccl(sizes, 8, DENSE, defaults) == pytest.approx(7e9, rel=0.05)
    assert nccl({**sizes, "ep_size": 2}, 8, EXPERTS, defaults) == pytest.approx(9.5e9, rel=0.1)


@pytest.mark.parametrize("nvls", [False, True])
def test_every_group_of_several_ranks_takes_memory_and_nvls_more(nvls: bool) -> None:
    cluster = Cluster(16, nvls=nvls)
    one_axis = [{"tp_size": 8, "sequence_parallel": True}, {"pp_size": 8}, {"cp_size": 8}]
    smallest = nccl({}, 128, DENSE, cluster)
    for sizes in one_axis:
        assert nccl(sizes, 128, DENSE, cluster) > smallest
        assert nccl({**sizes, "ep_size": 8}, 128, EXPERTS, cluster) > nccl(sizes, 128, DENSE, cluster)
    assert nccl(one_axis[0], 128, DENSE, Cluster(16, nvls=True)) > nccl(one_axis[0], 128, DENSE, Cluster(16))
    # On CPUs there is no NCCL, whatever its setting.
    assert nccl(one_axis[0], 128, DENSE, Cluster(16, gpus_per_node=0, nvls=nvls)) == 0


def test_servers_of_several_ranks_have_nccl_awake_and_asleep() -> None:
    def phases(ranks: int) -> dict[str, Any]:
        config = run_of(model={"offload": "all"}, **colocated(tp_size=ranks))
        return {phase.phase: phase.parts for phase in run_memory(config, parse_architecture(QWEN_7B), 8, Cluster()).phases}

    one, many = phases(1), phases(4)
    assert many["generate"]["engine_context"] - one["generate"]["engine_context"] == GIB
    assert many["train"]["engine_asleep"] - one["train"]["engine_asleep"] == GIB


def test_a_token_of_a_mini_batch_has_the_bytes_of_its_packed_fields() -> None:
    packed = pack([make_sample(4096, 1)], [1.0], ParallelLayout(1))
    found = {
        field.name: value.numel() * value.element_size()
        for field in fields(packed)
        if isinstance(value := getattr(packed, field.name), torch.Tensor)
    }
    # Numbers that only a critic, stale responses or the language-model loss have: four bytes a token each.
    absent = [name for name in ("staleness", "values", "returns", "positive_weights") if name not in found]
    assert "routing" not in found and "response_positions" in found
    num_bytes = sum(found.values()) + 4 * len(absent) * packed.num_tokens
    assert num_bytes / packed.num_tokens == pytest.approx(TOKEN_BYTES, rel=0.01)


def test_one_mini_batch_is_on_the_device_and_all_are_on_the_host() -> None:
    """Twice the mini-batches of half the size halve what is on the device, and leave the host as it was."""

    def memory_of(prompts: int, **parallel: Any) -> Any:
        rollout = {"prompts_per_step": 64, "group_size": 4, "max_response_tokens": 4096}
        config = run_of(rollout=rollout, training={"mini_batch_prompts": prompts}, parallel=parallel)
        return config, run_memory(config, parse_architecture(QWEN_7B), 8, Cluster())

    (config, large), (_, small) = memory_of(32), memory_of(16)
    packed = TOKEN_BYTES * 16 * 4 // 8 * (config.data.max_prompt_tokens + 4096)
    batches = [{phase.phase: phase.parts for phase in memory.phases}["train"]["batch"] for memory in (large, small)]
    assert batches[0] - batches[1] == packed and large.host == small.host
    # Fewer replicas have more of the samples each.
    _, fewer = memory_of(32, tp_size=4)
    assert {phase.phase: phase.parts for phase in fewer.phases}["train"]["batch"] > batches[0]
