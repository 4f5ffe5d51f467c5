"""Builds what rank 0 generates with from the configuration: data, verifiers, collector and evaluation."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_dapo.algorithms.length_reward import soft_overlong_penalty, soft_perplexity_penalty
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.data.dataset import PromptDataset, count_trained, load_sources, prompt_template, shares_of
from megatron_dapo.data.examples import load_examples
from megatron_dapo.data.fresh_prompts import FreshPrompts, PromptBook
from megatron_dapo.data.injection import Injection, injection_of
from megatron_dapo.data.model_inputs import ModelInputs, read_model_inputs
from megatron_dapo.data.prompt_stream import FunctionOrder, PromptStream
from megatron_dapo.data.sources import train_sources
from megatron_dapo.data.teacher_prompts import TeacherPrompts
from megatron_dapo.data.template_proof import TemplateProof
from megatron_dapo.engines.base import CollectiveEngine
from megatron_dapo.engines.shared import SharedEngine
from megatron_dapo.evaluation.build import evaluation_protocol, load_eval_dataset
from megatron_dapo.files.durable import Files
from megatron_dapo.rewards.build import open_verifier_pool, self_test
from megatron_dapo.rewards.pool.disagreement import Disagreement, ShadowedPool
from megatron_dapo.rewards.pool.environment import EnvironmentRewards
from megatron_dapo.rewards.pool.pool import VerifierPool
from megatron_dapo.rewards.verifiers.format import has_form
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import CollectProgress
from megatron_dapo.rollout.collector import Collector, CollectorInputs, LossLimits
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import FailureStreak, RewardAddend, SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.trainer.build_episodes import episode_engine, template_proof
from megatron_dapo.trainer.evaluator import EvaluationTask, Evaluator
from megatron_dapo.trainer.recorder import RunPaths
from megatron_dapo.trainer.sft import ExampleStream
from megatron_dapo.trainer.teacher_servers import TeacherServers
from megatron_dapo.types import Completion, Prompt, SamplingParams, Score
from megatron_dapo.untrusted import printable

if TYPE_CHECKING:
    # This imports megatron-core, which takes seconds: too slow for a check of inputs.
    from megatron_dapo.trainer.connect_engines import Engines
    from megatron_dapo.trainer.context import RunContext

logger = logging.getLogger(__name__)


@dataclass
class RolloutData:
    """Data, verifiers and collector, on rank 0. Fine-tuning has no collector, but examples."""

    inputs: ModelInputs
    scorer: Any  # VerifierPool or ShadowedPool
    collector: Collector | None
    engine: CollectiveEngine  # the run's, or one that plays episodes on it
    stream: PromptStream
    prompts: tuple[Prompt, ...]
    evaluation: EvaluationTask | None
    shared: SharedEngine | None = None  # the engine if evaluations run in the background
    examples: ExampleStream | None = None
    teacher_prompts: TeacherPrompts | None = None  # None without teachers
    teachers: TeacherServers | None = None  # None without servers
    proof: TemplateProof | None = None  # the chat template continues episodes exactly; None without episodes

    def disagreement_share(self) -> float:
        """Return the share of responses so far that the shadow verifier scored differently; 0 without one."""
        if not isinstance(self.scorer, ShadowedPool):
            return 0.0
        statistics = self.scorer.statistics()
        return statistics.num_disagreements / max(1, statistics.num_compared)


def build_rollout_data(context: RunContext, engines: Engines) -> RolloutData:
    """Return the parts that rank 0 collects with."""
    config, files = context.config, context.files

    def on_progress(progress: CollectProgress) -> None:
        context.phases.show("generate", progress.num_accepted, progress.num_groups)

    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    scorer = context.stack.enter_context(_scorer(config, files))
    pool = scorer.primary if isinstance(scorer, ShadowedPool) else scorer
    evaluation = _evaluation_task(config, inputs, pool, files)
    proof = template_proof(config, inputs)
    engine = context.stack.enter_context(episode_engine(config, proof, engines.engine))
    if config.algorithm.name == "sft":
        return _example_data(config, inputs, scorer, engine, evaluation)
    prompts = load_train_dataset(config, inputs, pool).prompts
    evaluation = _compared(evaluation, prompts)
    # The order of prompts has its own seed, so that runs with different run.seed can share it.
    injection, injected = prompt_injection(config, prompts, inputs)
    prompt_ids = [prompt.prompt_id for prompt in prompts]
    fresh = _fresh_prompts(config, inputs)
    shares = shares_of(config.data, prompts, fresh)
    order = FunctionOrder(config.data.order, prompts) if config.data.order else None
    epochs = config.data.max_epochs or None
    stream = PromptStream(prompt_ids, config.data.shuffle_seed, epochs, injection, shares, order)

    sampling = SamplingParams(
        config.rollout.temperature,
        config.rollout.top_p,
        config.rollout.top_k,
        config.rollout.max_response_tokens,
        inputs.stop_tokens.token_ids,
        with_support=config.rollout.is_restricted,
    )
    streak = FailureStreak(config.rollout.prompts_per_step * config.rollout.group_size)
    sample_scorer = SampleScorer(scorer, inputs.decode, reward_addends(config.reward), scorer, streak)
    book = PromptBook({prompt.prompt_id: prompt for prompt in prompts} | injected, tuple(fresh.values()))
    shared = SharedEngine(engine, engines.num_places) if config.evaluation.background and evaluation else None
    view = shared.rollout if shared else engine
    read_by_teachers = teacher_prompts(config, inputs)
    teachers = _teacher_servers(context, read_by_teachers, inputs)
    limits, on_kept = loss_limits(config), teachers.begin if teachers else None
    collector_inputs = CollectorInputs(stream, book, view, sample_scorer, on_progress, limits, on_kept)
    collector: Collector
    if config.algorithm.name == "tppo":
        collector = WindowCollector(collector_inputs, config.rollout, config.window, sampling, config.run.seed)
    else:
        collector = GroupCollector(collector_inputs, config.rollout, sampling, config.run.seed, config.distillation)
    return RolloutData(
        *(inputs, scorer, collector, engine, stream, prompts, evaluation, shared),
        teacher_prompts=read_by_teachers,
        teachers=teachers,
        proof=proof,
    )


def _teacher_servers(context: RunContext, prompts: TeacherPrompts | None, inputs: ModelInputs) -> TeacherServers | None:
    """Return the teachers that are servers, if there are any. ValueError for one with another tokenizer."""
    if prompts is None or not context.config.distillation.servers:
        return None
    servers = TeacherServers(context.config.distillation, prompts)
    context.stack.callback(servers.close)
    servers.check_tokens(inputs.tokenizer)
    return servers


def teacher_prompts(config: Config, inputs: ModelInputs) -> TeacherPrompts | None:
    """Return what renders the prompts that teachers read; None without teachers."""
    section, template = config.distillation, prompt_template(config.data, inputs.tokenizer, inputs.vocab_size)
    return TeacherPrompts(section, template) if section.teachers else None


def loss_limits(config: Config) -> LossLimits:
    """Return what becomes of groups with a lost episode."""
    environment = config.environment
    max_in_row = 1 if environment.on_lost == "fail" else config.rollout.prompts_per_step
    return LossLimits(max_in_row, environment.retries, environment.on_lost == "shrink")


def _example_data(
    config: Config, inputs: ModelInputs, scorer: Any, engine: CollectiveEngine, evaluation: EvaluationTask | None
) -> RolloutData:
    """Return the parts of fine-tuning; `scorer` is for its evaluations."""
    data = config.data
    examples = load_examples(
        data.train_paths,
        prompt_template(data, inputs.tokenizer, inputs.vocab_size),
        inputs.stop_tokens,
        data.max_prompt_tokens,
        config.rollout.max_response_tokens,
    )
    prompts = tuple(example.prompt for example in examples.values())
    order = FunctionOrder(data.order, prompts) if data.order else None
    stream = PromptStream(tuple(examples), data.shuffle_seed, data.max_epochs or None, order=order)
    return RolloutData(
        inputs,
        scorer,
        None,
        engine,
        stream,
        prompts,
        _compared(evaluation, prompts),
        examples=ExampleStream(examples, stream),
    )


def _fresh_prompts(config: Config, inputs: ModelInputs) -> dict[str, FreshPrompts]:
    """Return the prompts that are generated anew for each epoch, by the names of their sources."""
    template = prompt_template(config.data, inputs.tokenizer, inputs.vocab_size)
    limit = config.data.max_prompt_tokens
    begin_episodes = config.environment.is_on
    sources = [one for one in train_sources(config.data) if one.is_fresh]
    return {one.name: FreshPrompts(one, template, limit, begin_episodes) for one in sources}


def prompt_injection(
    config: Config, prompts: Sequence[Prompt], inputs: ModelInputs
) -> tuple[Injection | None, dict[str, Prompt]]:
    """Return the injection that chooses prompt rewrites, and the rewrites by id; None and {} without templates."""
    section = config.data.injection
    if not section.templates:
        return None, {}
    template = prompt_template(config.data, inputs.tokenizer, inputs.vocab_size)
    injection, by_id = injection_of(
        prompts,
        section,
        template,
        config.data.max_prompt_tokens,
        config.data.shuffle_seed,
        config.rollout.prompts_per_step,
    )
    logger.info("adversarial injection: %d rewrites of %d prompts", len(by_id), len(prompts))
    return injection, by_id


def _scorer(config: Config, files: Files) -> Any:
    """Return the verifier pool, paired with a shadow pool if reward.shadow_verifier names one."""
    primary = open_verifier_pool(config.reward)
    if not config.reward.shadow_verifier or isinstance(primary, EnvironmentRewards):
        return primary
    path = RunPaths(config.run.output_dir).disagreements
    files.make_directory(path.parent)

    def write(disagreement: Disagreement) -> None:
        files.append(path, printable(json.dumps(disagreement.record(), ensure_ascii=False)) + "\n")

    return ShadowedPool(primary, VerifierPool(config.reward.shadow_verifier, config.reward), write)


def reward_addends(reward: RewardConfig) -> dict[str, RewardAddend]:
    """Return the reward terms added to the verifier's, by name."""
    length, perplexity, form = reward.overlong_punishment, reward.perplexity_penalty, reward.format

    def overlong(completion: Completion, text: str, score: Score) -> float:
        tokens = torch.tensor([completion.num_sampled])
        return float(soft_overlong_penalty(tokens, length.max_length, length.cache_length, length.factor)[0])

    def improbable(completion: Completion, text: str, score: Score) -> float:
        # The log-probs come with the response, from the policy that sampled it: a reward passes no gradient.
        logprobs = torch.from_numpy(completion.sampled.logprobs)
        nll = -logprobs.double().mean()[None] if len(logprobs) else torch.zeros(1)
        bounds = perplexity.start, perplexity.end, perplexity.factor, perplexity.low_start, perplexity.low_end
        return float(soft_perplexity_penalty(nll, *bounds)[0])

    def formed(completion: Completion, text: str, score: Score) -> float:
        has_answer = score.extracted is not None and not completion.is_truncated
        is_described = form.markers or form.pattern
        return form.reward * (has_form(text, form.markers, form.pattern) if is_described else has_answer)

    switches = {
        "overlong": (length.enabled, overlong),
        "perplexity": (perplexity.enabled, improbable),
        "format": (form.reward > 0, formed),
    }
    return {name: addend for name, (is_on, addend) in switches.items() if is_on}


def _evaluation_task(config: Config, inputs: ModelInputs, pool: Any, files: Files) -> EvaluationTask | None:
    if not config.data.has_held_out:
        return None
    dataset = load_eval_dataset(config, inputs, pool)
    protocol = evaluation_protocol(config, str(config.model.path), dataset, inputs.stop_tokens, pool.version)
    return EvaluationTask(dataset, protocol, pool, inputs, RunPaths(config.run.output_dir).evaluations, files)


def _compared(task: EvaluationTask | None, prompts: Sequence[Prompt]) -> EvaluationTask | None:
    """Return the task with the number of its problems that are also trained on. ValueError if all are."""
    return task and replace(task, num_trained=count_trained(task.dataset.prompts, prompts))


def build_collector(context: RunContext, data: RolloutData, engines: Engines) -> AsyncCollector | None:
    """Return rank 0's collector, which collects ahead if servers have their own devices; None for fine-tuning."""
    if data.collector is None:
        return None
    config = context.config
    has_own_devices = config.rollout.engine == "sglang" and config.sglang.placement == "disaggregated"
    max_ahead = config.rollout.max_staleness if has_own_devices else 0
    recover = _recovery(engines, data.shared)
    collector = AsyncCollector(
        data.collector,
        max_ahead,
        config.run.wait_timeout_seconds,
        recover,
        check_stop=context.stop.check,
        # The embedded engine can repeat a collection bit for bit. Servers cannot, and their output is expensive.
        keep_stopped=config.rollout.engine != "embedded",
        overlaps=has_own_devices and config.training.stream != "off",
        keeps_requests=has_own_devices and config.sglang.update_pause != "abort",
    )
    context.stack.callback(collector.close)
    return collector


def _recovery(engines: Engines, shared: SharedEngine | None) -> Callable[[], bool] | None:
    """Return the function that restarts lost servers, while no other thread uses them; None without servers."""
    if engines.servers is None:
        return None
    recover = engines.servers.recover

    def recover_alone() -> bool:
        with shared.exclusive() if shared is not None else nullcontext():
            return recover()

    return recover_alone


def build_evaluator(
    context: RunContext, engines: Engines, data: RolloutData | None, collector: AsyncCollector | None
) -> Evaluator | None:
    """Return the evaluator for the held-out problems, or None without any. `data` and `collector`: rank 0 only."""
    config, stop = context.config, context.stop
    if not config.data.has_held_out:
        return None
    # An engine holds up to slots_per_rank sequences per rank; four times as many requests keep it full.
    max_in_flight = 4 * config.rollout.slots_per_rank * context.topology.policy_layout.world_size
    task = data.evaluation if data else None
    engine = data.engine if data else engines.engine
    shared, timeout_s = data.shared if data else None, config.run.wait_timeout_seconds
    evaluator = Evaluator(
        engine, task, max_in_flight, context.phases, collector, stop.check, engines.servers, shared, timeout_s
    )
    context.stack.callback(evaluator.cancel)
    return evaluator


def check_teachers_sources(config: Config, sources: Collection[str]) -> None:
    """Raise ValueError if a teacher's data source has no prompt: it would never teach."""
    for teacher in config.distillation.teachers:
        if unknown := sorted(set(teacher.sources) - set(sources)):
            raise ValueError(
                f"distillation.teachers: {teacher.name} teaches {', '.join(map(repr, unknown))}, but the data sources are "
                f"{', '.join(map(repr, sorted(sources)))}: correct its sources"
            )


def load_train_dataset(config: Config, inputs: ModelInputs, pool: Any) -> PromptDataset:
    """Load the training prompts and check that they ask for the answer format that the verifier reads."""
    data = config.data
    template = prompt_template(data, inputs.tokenizer, inputs.vocab_size)
    dataset = load_sources(
        train_sources(data),
        template,
        data.max_prompt_tokens,
        data.deduplicate,
        pool.validate_answers,
        config.environment.is_on,
    )
    if (of_teachers := teacher_prompts(config, inputs)) is not None:
        of_teachers.require(dataset.prompts, data.max_prompt_tokens)
    check_teachers_sources(config, {prompt.source_name for prompt in dataset.prompts})
    self_test(config.reward, inputs.tokenizer, pool, dataset.prompts)
    first = template.describe(dataset.prompts[0].messages)
    logger.debug("first prompt, template %s %s: %s", first["template"], first["template_hash"], first["text"])
    return dataset
