"""The validator reports everything at once, agrees with the layout's own arithmetic, and its suggestions work."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config import (
    Config,
    ConfigError,
    require_valid,
    schedule_steps,
    validate,
    validator,
)
from megatron_dapo.config.layout_rules import architecture_facts
from megatron_dapo.config.rules import broken, broken_rules
from megatron_dapo.config.schema import leaf_fields, section_types, union_names
from megatron_dapo.config.section import is_function_path
from megatron_dapo.config.validator import field_bounds
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.rounding import nearest_divisor
from tests.examples import examples
from tests.unit.config import architectures
from tests.unit.config.small import make

FREE = {"environment.success", "reward.correct", "reward.incorrect", "reward.judge.threshold", "reward.reward_model.threshold"}
MAY_BE_NEGATIVE = {"critic.explained_variance_alarm", *FREE}

QWEN_32B = parse_architecture(architectures.QWEN_32B)


def paths(config: Config, **facts: Any) -> list[str]:
    return [violation.path for violation in validate(config, **facts)]


def test_valid_configuration_has_no_violation() -> None:
    assert validate(make()) == []
    require_valid(make(), world_size=1, architecture=QWEN_32B)


GIVEN_SERVERS = (
    "rollout.engine=sglang sglang.urls=['http://10.0.0.1:30000'] sglang.api_key_file=engine.key "
    "sglang.weight_sync_transport=p2p sglang.placement=disaggregated"
)
FP8_SERVERS = "rollout.engine=sglang sglang.quantization=fp8 algorithm.off_policy.correction=tis"
STALE = "rollout.max_staleness=1 algorithm.off_policy.correction=tis"
IN_FLIGHT = (
    f"{STALE} rollout.engine=sglang rollout.partial_rollout=true sglang.placement=disaggregated sglang.update_pause=retract"
)
OVER_NODES = (
    "rollout.engine=sglang sglang.placement=disaggregated sglang.weight_sync_transport=p2p sglang.tp_size=4 sglang.nodes_per_server=2"
)
DRAFTS = (
    "rollout.engine=sglang sglang.drafting=history sglang.enable_deterministic_inference=false sglang.attention_backend=triton"
)
PUNISHMENT = "reward.overlong_punishment"


def punished(max_length: int) -> str:
    return f"{PUNISHMENT}.enabled=true {PUNISHMENT}.max_length={max_length} {PUNISHMENT}.cache_length=16"


# The field to change, and the overrides that break one rule.
STREAM = "training.stream=mini_batches training.shuffle=false"
TAIL = "rollout.tail_rounds=true rollout.oversample=1.1"
BROKEN = [
    ("training.shuffle", "training.stream=mini_batches"),
    ("training.epochs", f"{STREAM} training.epochs=2"),
    ("training.mini_batch_prompts", f"{STREAM} rollout.prompts_per_step=4"),
    ("algorithm.loss.aggregation", f"{STREAM} algorithm.loss.aggregation=rollout_token_mean"),
    ("algorithm.advantage.name", f"{STREAM} algorithm.advantage.name=reinforce_baseline"),
    ("rollout.budget.enabled", f"{STREAM} rollout.budget.enabled=true"),
    ("rollout.dynamic_sampling", f"{STREAM} rollout.dynamic_sampling=soft"),
    ("rollout.on_exhausted", f"{STREAM} rollout.on_exhausted=stop"),
    ("rollout.replay_order", f"{STREAM} {STALE} rollout.oversample=2 rollout.replay_order=newest"),
    ("sglang.placement", f"{STREAM} rollout.engine=sglang"),
    ("algorithm.name", f"{STREAM} algorithm.name=vapo"),
    ("algorithm.off_policy.correction", "training.old_logprobs=rollout algorithm.off_policy.correction=tis"),
    ("training.old_logprobs", "training.old_logprobs=rollout algorithm.name=vapo"),
    ("training.mini_batch_prompts", "training.mini_batch_prompts=3"),
    ("training.micro_batch_tokens", "training.micro_batch_tokens=95"),
    ("rollout.group_size", "rollout.group_size=1"),
    ("algorithm.advantage.name", "algorithm.advantage.name=maxrl"),
    ("rollout.accuracy_min", "rollout.accuracy_min=0.3 rollout.accuracy_max=0.4"),
    ("data.injection.when", "data.injection.templates=['noise'] rollout.filter_groups=false"),
    ("data.injection.rate", "data.injection.templates=['noise'] data.injection.rate=0.1"),
    ("data.injection.templates", "data.injection.templates=['answer_range'] data.injection.when=visit"),
    ("data.injection.templates", "data.injection.templates=['noise'] rollout.budget.enabled=true"),
    ("data.injection.templates", "data.injection.templates=['noise'] rollout.prompt_order=priority"),
    ("data.injection.templates", "data.injection.templates=['noise'] rollout.prompt_filter.name=bounds"),
    ("rollout.top_k", "rollout.top_p=0.9"),
    ("rollout.top_k", "rollout.top_k=1"),
    ("rollout.top_k", "rollout.top_k=4097"),
    ("algorithm.gkl.coefficient", "rollout.top_k=50 algorithm.gkl.coefficient=0.1"),
    ("sglang.update_pause", f"{IN_FLIGHT} rollout.top_k=50"),
    ("sglang.drafting", f"{DRAFTS} rollout.top_k=50"),
    ("rollout.max_staleness", "rollout.max_staleness=1"),
    ("rollout.oversample", "rollout.oversample=1.5"),
    ("rollout.tail_rounds", "rollout.tail_rounds=true"),
    ("rollout.tail_rounds", f"{STALE} {TAIL}"),
    ("rollout.tail_rounds", f"{TAIL} rollout.budget.enabled=true"),
    ("rollout.tail_rounds", f"{TAIL} {STREAM}"),
    ("rollout.tail_rounds", f"{TAIL} data.injection.templates=['noise']"),
    ("rollout.dynamic_sampling", "rollout.dynamic_sampling=soft rollout.filter_groups=false"),
    ("rollout.replay_order", "rollout.replay_order=newest"),
    ("rollout.budget.min_size", "rollout.budget.enabled=true rollout.budget.min_size=65"),
    ("data.max_epochs", "rollout.prompt_order=priority data.max_epochs=2"),
    ("rollout.temperature", "rollout.temperature=0.0"),
    ("rollout.partial_rollout", f"{STALE} rollout.engine=sglang sglang.placement=disaggregated"),
    ("sglang.weight_sync_full_interval", "rollout.engine=embedded sglang.weight_sync_full_interval=8"),
    ("sglang.weight_sync_full_interval", "rollout.engine=sglang sglang.weight_sync_full_interval=8 sglang.weight_sync_transport=disk"),
    ("sglang.update_pause", "sglang.update_pause=retract"),
    ("sglang.update_pause", f"{IN_FLIGHT} sglang.placement=colocated"),
    ("sglang.update_pause", f"{IN_FLIGHT} rollout.max_staleness=0"),
    ("sglang.update_pause", f"{IN_FLIGHT} rollout.routing_replay=true"),
    ("sglang.update_pause", f"{IN_FLIGHT} sglang.update_pause=in_place"),
    ("sglang.nodes_per_server", f"{OVER_NODES} sglang.nodes_per_server=3"),
    ("sglang.nodes_per_server", f"{OVER_NODES} sglang.placement=colocated"),
    ("sglang.nodes_per_server", f"{OVER_NODES} sglang.weight_sync_transport=disk"),
    ("sglang.nodes_per_server", f"{GIVEN_SERVERS} sglang.tp_size=2 sglang.nodes_per_server=2"),
    ("sglang.drafting", "sglang.drafting=history sglang.enable_deterministic_inference=false sglang.attention_backend=triton"),
    ("sglang.drafting", f"{DRAFTS} sglang.enable_deterministic_inference=true"),
    ("sglang.drafting", f"{DRAFTS} sglang.attention_backend=fa3"),
    ("sglang.drafting", f"{DRAFTS} rollout.routing_replay=true"),
    ("sglang.drafting", f"{OVER_NODES} {DRAFTS}"),
    ("sglang.drafting", f"{GIVEN_SERVERS} {DRAFTS}"),
    ("sglang.drafting", f"{IN_FLIGHT} {DRAFTS}"),
    ("sglang.ep_size", "rollout.engine=sglang sglang.tp_size=4 sglang.ep_size=3"),
    ("parallel.etp_size", "parallel.tp_size=4 parallel.etp_size=3 parallel.ep_size=2"),
    ("parallel.etp_size", "parallel.tp_size=4 parallel.etp_size=2"),
    ("sglang.max_total_tokens", "rollout.engine=sglang sglang.max_total_tokens=95"),
    ("parallel.use_distributed_optimizer", "megatron.overlap_param_gather=true parallel.use_distributed_optimizer=false"),
    ("rollout.routing_replay", "rollout.routing_replay=true"),
    (
        "rollout.routing_replay",
        "rollout.engine=sglang rollout.routing_replay=true model.recompute_granularity=selective "
        "megatron.recompute_modules=['moe','core_attn']",
    ),
    ("sglang.api_key_file", f"{GIVEN_SERVERS} sglang.api_key_file="),
    ("sglang.weight_sync_transport", f"{GIVEN_SERVERS} sglang.weight_sync_transport=shared_memory"),
    ("sglang.placement", f"{GIVEN_SERVERS} sglang.placement=colocated"),
    ("sglang.quantization", "rollout.engine=sglang sglang.quantization=fp8"),
    ("sglang.quantization", "sglang.quantization=fp8 algorithm.off_policy.correction=tis"),
    ("sglang.weight_sync_transport", f"{FP8_SERVERS} sglang.weight_sync_transport=disk"),
    ("algorithm.off_policy.low", "algorithm.off_policy.correction=icepop"),
    ("algorithm.off_policy.level", "algorithm.off_policy.correction=tis algorithm.loss=gspo"),
    ("algorithm.loss.clip_ratio_low", "algorithm.loss.clip_ratio_low=1.5"),
    ("algorithm.loss.dual_clip", "algorithm.loss.dual_clip=0.9"),
    ("advantage_estimation.gamma", "advantage_estimation.gamma=1.5"),
    (f"{PUNISHMENT}.cache_length", punished(16)),
    (f"{PUNISHMENT}.max_length", punished(65)),
    ("reward.overlong_filter", f"{punished(64)} reward.overlong_filter=true"),
    ("reward.verifier", "reward.verifier=strict"),
    ("reward.verifier", "reward.verifier=no-such:thing"),
    ("reward.shadow_verifier", "reward.shadow_verifier=dapo"),
    ("reward.correct", "reward.correct=-1.0"),
    ("run.max_generation_steps", "run.max_generation_steps=50"),
    ("rollout.max_num_gen_batches", "rollout.max_num_gen_batches=0"),
    ("optimizer.warmup_steps", "optimizer.warmup_steps=100 optimizer.schedule=cosine"),
    ("optimizer.min_learning_rate", "optimizer.min_learning_rate=1.0 optimizer.schedule=linear"),
    ("data.eval_paths", "data.eval_paths=[] data.held_out_share=0 evaluation.interval=1"),
    ("data.train_paths", "data.train_paths=[]"),
    ("evaluation.num_samples", "evaluation.temperature=0.0"),
    ("parallel.vpp_size", "parallel.vpp_size=2"),
    ("parallel.sequence_parallel", "parallel.sequence_parallel=true"),
    ("optimizer.betas", "optimizer.betas=[0.9,1.0]"),
    ("checkpoint.keep_every", "checkpoint.keep_every=30"),
    ("checkpoint.keep_every", "checkpoint.keep_every=30 checkpoint.interval=0"),
    ("nodes.detector", "nodes.detector=false nodes.action=\"exclude\""),
    ("checkpoint.keep_best", "checkpoint.keep_best=eval/best evaluation.interval=10"),
    ("checkpoint.keep_best", "checkpoint.keep_best=eval/avg_at_k evaluation.interval=0"),
    ("checkpoint.keep_best", "checkpoint.keep_best=eval/avg_at_k evaluation.interval=3"),
]

# Relations within one section, by the field to change.
BROKEN_SECTIONS = [
    ("precision.recipe", "precision.recipe=fp8_delayed precision.num_layers_at_end_in_bf16=1"),
    (
        "algorithm.gkl.weighted_mse",
        "algorithm.gkl.coefficient=0.1 algorithm.gkl.weighted_mse=0.0 algorithm.gkl.cross_entropy=0.0",
    ),
    ("algorithm.advantage.name", "algorithm.name=vapo algorithm.advantage=a:b"),
    ("value_pretraining.max_steps", "value_pretraining.max_steps=3"),
    ("data.chat_template_options", "data.template=plain data.chat_template_options={x=1}"),
    ("data.prompt_template", "data.prompt_template=x"),
    ("data.sources", "data.sources=[{path='a'}]"),
    ("data.sources", "data.train_paths=[] data.sources=[{path='a',weight=0.0}]"),
    ("data.order", "data.train_paths=[] data.sources=[{path='a'}] data.order=a:b"),
    (
        "data.sources",
        "data.train_paths=[] data.sources=[{path='reasoning_gym:a'}] data.injection.templates=['noise'] "
        "data.injection.when=visit",
    ),
    ("rollout.group_filter", "rollout.group_filter=a:b rollout.filter_groups=false"),
    ("rejection_sampling.encoder_path", "rejection_sampling.embedding=encoder"),
    ("rejection_sampling.length_quantiles", "rejection_sampling.length_quantiles=[0.9,0.1]"),
    ("reward.shadow_verifier", "reward.shadow_verifier=strict"),
    ("reward.verifier", "reward.mix=[{verifier='dapo'}]"),
    ("reward.mix", "reward.verifier=mix reward.mix=[{verifier='strict'}]"),
    ("reward.mix", "reward.verifier=mix reward.mix=[{verifier='dapo'},{verifier='dapo'}]"),
    ("reward.mix", "reward.verifier=mix reward.mix=[{verifier='dapo',name='overlong'}]"),
    ("reward.mix", "reward.verifier=mix reward.mix=[{verifier='dapo',weight=0.0}]"),
    ("reward.mix", "reward.verifier=mix reward.mix=[{verifier='dapo',decides=true},{verifier='lenient',decides=true}]"),
    ("data.columns.answer", "data.columns.answer="),
    ("reward.code.tests", "reward.verifier=code data.columns.answer="),
    ("reward.timeout_seconds", "reward.verifier=code reward.code.seconds_per_test=9.5"),
    ("reward.code.memory_limit_mb", "reward.verifier=code reward.code.memory_limit_mb=4096"),
    ("reward.max_processes", "reward.verifier=code reward.code.max_processes=61"),
    ("reward.judge.url", "reward.verifier=judge"),
    ("reward.remote.url", "reward.verifier=remote reward.remote.url=ftp://host"),
    ("reward.reward_model.url", "reward.verifier=reward_model reward.reward_model.path=/m reward.reward_model.url=host"),
    ("reward.timeout_seconds", "reward.verifier=judge reward.judge.url=http://h reward.judge.request_seconds=11"),
    ("reward.judge.score_key", "reward.judge.score_key=score reward.judge.score_pattern=(.*)"),
    ("reward.reward_model.path", "reward.verifier=reward_model"),
    ("reward.format.markers", "reward.verifier=format"),
    ("reward.format.reward", "reward.verifier=format reward.format.pattern=a reward.format.reward=1.0"),
    ("reward.perplexity_penalty.end", "reward.perplexity_penalty.enabled=true reward.perplexity_penalty.end=0.5"),
    ("reward.perplexity_penalty.low_start", "reward.perplexity_penalty.enabled=true reward.perplexity_penalty.low_start=2"),
]


@pytest.mark.parametrize(("path", "overrides"), BROKEN + BROKEN_SECTIONS)
def test_each_rule_is_found_alone(path: str, overrides: str) -> None:
    found = validate(make(overrides))
    assert [violation.path for violation in found] == [path]
    assert found[0].values and found[0].suggestion and found[0].formula


def test_a_section_prints_the_relation_that_it_has_checked() -> None:
    """Evaluated as relations between sections are, the printed formula does not hold, and its condition does."""
    num_rules = 0
    for _, overrides in BROKEN + BROKEN_SECTIONS:
        config = make(overrides)
        for rule in broken_rules(config):
            num_rules += 1
            assert len(list(broken([rule], config, {"is_function_path": is_function_path, **rule.values}))) == 1, rule
    assert num_rules >= 55


def test_rewrites_and_the_choice_of_prompts_are_refused_with_both_values_and_the_fix() -> None:
    found = validate(make("data.injection.templates=['noise'] rollout.prompt_filter.name=model"))
    text = str(found[0])
    assert text.startswith("data.injection.templates = ('noise',): rewrites are drawn by their share of a batch")
    assert "(rollout.prompt_filter.name = 'model')" in text and "\n" not in text
    assert text.endswith('Fix: set data.injection.templates = [], or rollout.prompt_filter.name = "none"')


@pytest.mark.parametrize(
    "overrides",
    [
        "rollout.top_p=0.9 rollout.top_k=100",
        f"{STALE} rollout.max_staleness=2",
        f"{punished(64)} reward.overlong_filter=true reward.allow_overlong_filter_and_punishment=true",
        "data.injection.templates=['noise']",
        "rollout.budget.enabled=true rollout.prompt_order=priority rollout.prompt_filter.name=model",
        "reward.verifier=package.module:score",
        GIVEN_SERVERS,
        FP8_SERVERS,
        f"{FP8_SERVERS} algorithm.off_policy.correction=none sglang.allow_quantization_bias=true",
        f"{STALE} rollout.engine=sglang rollout.partial_rollout=true sglang.placement=disaggregated",
        IN_FLIGHT,
        f"{IN_FLIGHT} sglang.update_pause=in_place sglang.enable_deterministic_inference=false",
        OVER_NODES,
        DRAFTS,
        "algorithm.loss.dual_clip=off",
        "evaluation.temperature=0 evaluation.num_samples=1",
        "data.eval_paths=[]",
    ],
)
def test_the_declared_ways_out_are_accepted(overrides: str) -> None:
    assert validate(make(overrides)) == []


@settings(max_examples=examples(60), deadline=None)
@given(st.sets(st.sampled_from(range(len(BROKEN))), max_size=8))
def test_all_violations_are_reported_together(chosen: set[int]) -> None:
    # Rules of one section may lean on the same fields, and rollout, algorithm and sglang on each other: combine one of each.
    together = {"rollout": "algorithm", "sglang": "algorithm"}
    combined, taken, expected = "", set(), set()
    for path, overrides in (BROKEN[index] for index in sorted(chosen)):
        sections = {together.get(name, name) for name in re.findall(r"(\w+)\.[\w.]+=", overrides)}
        if not sections & taken:
            combined, taken = f"{combined} {overrides}", taken | sections
            expected.add(path)
    assert expected <= set(paths(make(combined)))


SIZES = st.sampled_from([1, 2, 3, 4, 8])


@settings(max_examples=examples(300), deadline=None)
@given(
    tensor=SIZES,
    pipeline=SIZES,
    virtual=st.sampled_from([1, 2]),
    context=SIZES,
    expert=SIZES,
    expert_tensor=st.sampled_from([0, 1, 2, 4]),
    sequence=st.booleans(),
    world=st.integers(1, 128),
)
def test_layout_rules_agree_with_the_layout(
    tensor: int, pipeline: int, virtual: int, context: int, expert: int, expert_tensor: int, sequence: bool, world: int
) -> None:
    config = make(
        parallel={
            "tp_size": tensor,
            "pp_size": pipeline,
            "vpp_size": virtual,
            "cp_size": context,
            "ep_size": expert,
            "etp_size": expert_tensor,
            "sequence_parallel": sequence,
        },
        training__micro_batch_tokens=4096,
        training__mini_batch_prompts=8,
        rollout__group_size=16,
    )
    try:
        layout = ParallelLayout(world, tensor, pipeline, virtual, context, expert, sequence, expert_tensor or None)
    except ValueError:
        layout = None
    found = validate(config, world_size=world)
    assert (layout is None) == any(violation.path.startswith("parallel.") for violation in found)


@settings(max_examples=examples(200), deadline=None)
@given(prompts=st.integers(1, 200), mini=st.integers(1, 200))
def test_suggested_mini_batch_is_valid(prompts: int, mini: int) -> None:
    found = validate(make(rollout__prompts_per_step=prompts, training__mini_batch_prompts=mini))
    assert bool(found) == bool(prompts % mini)
    if found:
        assert found[0].values == {"training.mini_batch_prompts": mini, "rollout.prompts_per_step": prompts}
        fixed = int(found[0].suggestion.rpartition(" ")[2])
        assert validate(make(rollout__prompts_per_step=prompts, training__mini_batch_prompts=fixed)) == []


@settings(max_examples=examples(100), deadline=None)
@given(number=st.integers(1, 500), wanted=st.integers(1, 500))
def test_nearest_divisor(number: int, wanted: int) -> None:
    divisor = nearest_divisor(number, wanted)
    assert number % divisor == 0
    assert all(number % other or abs(other - wanted) >= abs(divisor - wanted) for other in range(1, number + 1))


def test_micro_batch_holds_the_longest_sequence_with_its_padding() -> None:
    parallel = {"tp_size": 2, "cp_size": 3, "sequence_parallel": True}
    config = make(parallel=parallel, training__micro_batch_tokens=96, rollout__max_response_tokens=65)
    found = [violation for violation in validate(config) if violation.path == "training.micro_batch_tokens"]
    assert "= 102 or more" in found[0].suggestion and found[0].values["multiple"] == 6


def test_world_size_error_holds_both_numbers() -> None:
    found = validate(make(parallel__tp_size=4, parallel__pp_size=2), world_size=12)
    assert [violation.path for violation in found] == ["parallel.tp_size"]
    assert (
        found[0].values["processes"] == 12
        and found[0].values["model_size"] == 8
        and "start 16 processes" in found[0].suggestion
    )


def test_too_few_processes_named() -> None:
    found = validate(make(parallel__tp_size=2, parallel__num_processes=4), world_size=2)
    assert [violation.path for violation in found] == ["parallel.num_processes"]


def test_every_data_parallel_rank_gets_a_response() -> None:
    config = make(training__mini_batch_prompts=1)
    assert paths(config, world_size=4) == []
    assert paths(config, world_size=5) == ["training.mini_batch_prompts"]


@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        ("parallel.tp_size", "parallel.tp_size=16"),
        ("parallel.pp_size", "parallel.pp_size=4 parallel.vpp_size=3"),
        ("rollout.max_response_tokens", f"rollout.max_response_tokens={131072 - 31} training.micro_batch_tokens={2**20}"),
        ("evaluation.max_response_tokens", "evaluation.max_response_tokens=131072"),
        ("parallel.ep_size", "parallel.ep_size=2 parallel.cp_size=2"),
        ("sglang.tp_size", "rollout.engine=sglang sglang.tp_size=16"),
        ("sglang.tp_size", "rollout.engine=sglang sglang.tp_size=5"),
        ("rollout.routing_replay", "rollout.engine=sglang rollout.routing_replay=true"),
    ],
)
def test_architecture_rules(path: str, overrides: str) -> None:
    assert set(paths(make(overrides), architecture=QWEN_32B)) == {path}


QWEN_30B_A3B = parse_architecture(
    {
        **architectures.EXPERTS,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "hidden_size": 2048,
        "intermediate_size": 6145,  # size of dense layers, which it does not have
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "moe_intermediate_size": 768,
    }
)


@pytest.mark.parametrize(
    ("path", "parallel", "world"),
    [
        ("", {"tp_size": 4, "ep_size": 8, "sequence_parallel": True, "etp_size": 1}, 8),
        ("parallel.sequence_parallel", {"tp_size": 2}, 2),
        ("parallel.ep_size", {"ep_size": 3}, 3),
        ("parallel.etp_size", {"tp_size": 512, "ep_size": 2, "sequence_parallel": True}, 1024),
    ],
)
def test_rules_of_experts(path: str, parallel: dict[str, Any], world: int) -> None:
    found = paths(make(parallel=parallel), architecture=QWEN_30B_A3B, world_size=world)
    assert path in found if path else not found


def test_schedule_counts_in_its_unit() -> None:
    assert schedule_steps(make(run__total_steps=7)) == 7
    assert (
        schedule_steps(make(run__total_steps=7, optimizer__warmup_unit="optimizer_step", training__epochs=3))
        == 7 * 2 * 3
    )


def test_every_number_has_a_range() -> None:
    numbers = {path for path, field in leaf_fields().items() if field.annotation in (int, float)}
    bounded = set(field_bounds(make()))
    for section in ("algorithm.loss", "algorithm.advantage"):
        for name in union_names(section):
            bounded |= set(field_bounds(make(f"{section}={name}")))
    assert numbers - bounded == FREE


def test_ranges_refuse_minus_one() -> None:
    numbers = {path: field.annotation for path, field in leaf_fields().items() if field.annotation in (int, float)}
    wanted = numbers.keys() - MAY_BE_NEGATIVE
    assert [path for path in sorted(wanted) if path not in paths(of_member(path, numbers[path](-1)))] == []


def of_member(path: str, number: float) -> Config:
    """A configuration with a field set; of a union the first member that has it."""
    section, _, name = path.rpartition(".")
    member = next(model for model in section_types()[section] if name in model.model_fields)
    chosen = f"{section}={member.model_fields['name'].default}" if union_names(section) else ""
    return make(f"{chosen} {path}={number}")


def test_error_lists_every_violation() -> None:
    config = make(training__mini_batch_prompts=3, rollout__top_k=1)
    with pytest.raises(ConfigError) as error:
        require_valid(config)
    text = str(error.value)
    assert "2 problems" in text and "training.mini_batch_prompts = 3" in text and "rollout.top_k = 1" in text


def test_validator_needs_no_torch() -> None:
    code = "import sys, megatron_dapo.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_nothing_divides_by_zero() -> None:
    for path in leaf_fields():
        if leaf_fields()[path].annotation is int:
            validate(of_member(path, 0), world_size=0, architecture=QWEN_32B)
            assert math.isfinite(len(paths(of_member(path, 0), world_size=4)))


# Windows that are generated while those before are trained.
_AHEAD = "rollout.engine=sglang sglang.placement=disaggregated rollout.max_staleness=1 algorithm.off_policy.correction=tis"


@pytest.mark.parametrize(
    ("algorithm", "overrides", "path"),
    [
        ("dapo", "algorithm.positive_example_coefficient=0.1", "algorithm.positive_example_coefficient"),
        ("dapo", "algorithm.kl_reward_coefficient=0.1", "algorithm.kl_reward_coefficient"),
        ("vapo", "critic.mini_batch_prompts=3", "critic.mini_batch_prompts"),
        ("vapo", "critic.micro_batch_tokens=64", "critic.micro_batch_tokens"),
        # 96 tokens hold the longest sequence, but not as 5 context ranks of the critic cut it: 100.
        (
            "vapo",
            "training.micro_batch_tokens=96 critic.parallel.cp_size=5 parallel.num_processes=5",
            "critic.micro_batch_tokens",
        ),
        ("ppo", "critic.warmup_train_steps=100", "critic.warmup_train_steps"),
        ("vapo", "advantage_estimation.lambda_rule=window", "advantage_estimation.lambda_rule"),
        ("tppo", "window.tokens=65", "window.tokens"),
        ("tppo", "window.ignored_tail_tokens=16", "window.ignored_tail_tokens"),
        ("tppo", "rollout.filter_groups=true", "rollout.filter_groups"),
        ("tppo", "rollout.oversample=1.5", "rollout.oversample"),
        ("tppo", "rollout.oversample=1.5 rollout.tail_rounds=true", "rollout.oversample rollout.tail_rounds"),
        ("tppo", f"{_AHEAD} rollout.max_staleness=2", "rollout.max_staleness"),
        ("tppo", f"{_AHEAD} sglang.placement=colocated", "rollout.max_staleness"),
        ("tppo", f"{_AHEAD} rollout.engine=embedded", "rollout.max_staleness"),
        ("tppo", f"{_AHEAD} rollout.ahead=0.5", "rollout.ahead"),
        ("tppo", f"{_AHEAD} algorithm.off_policy.correction=none", "rollout.max_staleness"),
        ("tppo", f"{_AHEAD} sglang.update_pause=retract", "sglang.update_pause"),
        ("tppo", "reward.overlong_filter=true", "reward.overlong_filter"),
        ("tppo", "advantage_estimation.critic_lambda=0.95", "advantage_estimation.critic_lambda"),
        ("tppo", "window.windows_per_step=3", "window.windows_per_step"),
        ("tppo", "value_pretraining.max_steps=3", "value_pretraining.max_steps"),
    ],
)
def test_rules_of_the_value_path(algorithm: str, overrides: str, path: str) -> None:
    base = f"algorithm.name={algorithm} window.tokens=16 rollout.filter_groups=false"
    assert validate(make(base)) == []
    assert sorted(paths(make(f"{base} {overrides}"))) == path.split()


def test_tail_rounds_are_for_runs_on_policy() -> None:
    assert validate(make(TAIL)) == []


def test_windows_may_overlap_on_servers_with_their_own_devices() -> None:
    assert validate(make(f"algorithm.name=tppo window.tokens=16 rollout.filter_groups=false {_AHEAD}")) == []


def test_the_critic_is_cut_as_the_policy_by_default() -> None:
    config = make(parallel__tp_size=2, parallel__pp_size=2, parallel__vpp_size=2, parallel__sequence_parallel=True)
    assert config.critic_parallel == config.parallel
    other = make(
        parallel__tp_size=2, parallel__pp_size=2, parallel__vpp_size=2, parallel__sequence_parallel=True,
        critic__parallel__tp_size=1, critic__parallel__pp_size=1,
    ).critic_parallel  # fmt: skip
    assert (other.tp_size, other.pp_size, other.vpp_size, other.sequence_parallel) == (1, 1, 1, False)


def test_the_critics_layout_is_checked_like_the_policys() -> None:
    config = make(algorithm__name="vapo", parallel__tp_size=2, critic__parallel__tp_size=3)
    found = validate(config, 2, QWEN_32B)
    assert {violation.path for violation in found} == {"critic.parallel.tp_size"}


def with_own(**values: Any) -> Config:
    return make(**{"algorithm__name": "vapo", "rollout__filter_groups": False, "parallel__tp_size": 2, **values})


def test_the_critics_own_processes_come_on_top() -> None:
    config = with_own(critic__parallel__num_processes=1, critic__parallel__tp_size=1)
    assert (config.num_processes, config.num_critic_processes) == (3, 1)
    assert validate(config) == validate(config, 3, QWEN_32B) == []
    assert paths(config, world_size=5) == [] and paths(config, world_size=4) == ["parallel.tp_size"]
    without = make(parallel__tp_size=2, critic__parallel__num_processes=1)
    assert (without.num_processes, without.num_critic_processes) == (2, 0), "an algorithm without a critic has none"


def test_processes_the_critic_cannot_be_cut_over_are_refused() -> None:
    [found] = validate(with_own(critic__parallel__num_processes=3))
    assert found.path == "critic.parallel.tp_size" and found.values["processes"] == 3
    assert "set critic.parallel.num_processes = 4" in found.suggestion
    [found] = validate(with_own(critic__parallel__num_processes=2, critic__parallel__tp_size=3))
    assert found.values["critic.parallel.tp_size"] == 3


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_are_left_for_the_policy(world_size: int) -> None:
    config = with_own(critic__parallel__num_processes=3, critic__parallel__tp_size=1)
    [found] = validate(config, world_size=world_size)
    assert found.path == "critic.parallel.num_processes" and "start 5 processes" in found.suggestion
    assert found.values == {"critic.parallel.num_processes": 3, "processes": world_size}


def test_a_wrong_number_of_processes_is_named_with_those_of_the_critic() -> None:
    config = with_own(critic__parallel__num_processes=1, critic__parallel__tp_size=1, parallel__num_processes=4)
    [found] = validate(config, world_size=3)
    assert found.path == "parallel.num_processes" and "start 5 processes" in found.suggestion


ALL_RULES = (
    *validator.RULES,
    *validator.LAYOUT_RULES,
    *(rule for layout in (validator.POLICY, validator.CRITIC) for rule in validator.world_rules(layout)),
    *(rule for layout in (validator.POLICY, validator.CRITIC) for rule in validator.architecture_rules(layout)),
    *validator.PRECISION_RULES,
    *validator.PRECISION_ARCHITECTURE_RULES,
    *validator.CRITIC_RULES,
    *validator.ENGINE_RULES,
    *validator.STREAM_RULES,
    validator.OWN_PROCESSES_RULE,
)


def test_every_expression_of_a_rule_can_be_evaluated() -> None:
    """Expressions of `when` and `fix` that no broken configuration of these tests reaches must evaluate, too."""
    # Sizes whose 0 stands for another field are given: `when` keeps 0 from a formula that divides by it.
    sizes = dict.fromkeys(("tp_size", "pp_size", "vpp_size", "cp_size", "ep_size"), 1)
    config = make(
        algorithm__name="tppo", parallel__etp_size=1, critic__mini_batch_prompts=4, critic__parallel=sizes
    )
    facts = facts_of(config)
    for rule in ALL_RULES:
        for formula, when in (("False", "True"), (rule.formula, "True"), (rule.formula, rule.when)):
            found = list(broken([replace(rule, formula=formula, when=when)], config, facts))
            assert not found or (found[0].path and "{" not in found[0].suggestion), rule.formula


def facts_of(config: Config) -> dict[str, Any]:
    return {**validator.facts_of(config, 1), **architecture_facts(QWEN_32B)}


def test_a_rule_is_silent_if_a_field_it_names_is_out_of_range() -> None:
    """A divisor of 0 has its own line; -3 would make two of one mistake."""
    for number in (0, -3):
        assert paths(make(training__mini_batch_prompts=number)) == ["training.mini_batch_prompts"]
