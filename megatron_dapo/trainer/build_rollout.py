"""Data, verifiers, collector and evaluation from the configuration: what rank 0 generates with."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megatron_dapo.algorithms.length_reward import soft_overlong_penalty, soft_perplexity_penalty
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.data.dataset import (
    PromptDataset,
    load_eval_sources,
    load_sources,
    prompt_template,
    shares_of,
)
from megatron_dapo.data.examples import Example, load_examples
from megatron_dapo.data.fresh_prompts import FreshPrompts, PromptBook
from megatron_dapo.data.injection import Injection, injection_of
from megatron_dapo.data.prompt_stream import FunctionOrder, PromptStream
from megatron_dapo.data.sources import eval_sources, train_sources
from megatron_dapo.data.template import StopTokens, check_special_tokens, resolve_stop_token_ids
from megatron_dapo.engines.base import CollectiveEngine
from megatron_dapo.evaluation.protocol import EvaluationProtocol
from megatron_dapo.files.durable import Files
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.rewards.pool.disagreement import Disagreement, ShadowedPool
from megatron_dapo.rewards.pool.mixture import MixtureComponent, MixturePool
from megatron_dapo.rewards.pool.pool import VerifierPool, score_request
from megatron_dapo.rewards.verifiers.format import has_form
from megatron_dapo.rewards.verifiers.self_test import check_contract
from megatron_dapo.rewards.verifiers.verifier import SET_PRESETS
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.batch import CollectProgress
from megatron_dapo.rollout.collector import Collector, CollectorInputs
from megatron_dapo.rollout.example_collector import ExampleCollector
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import RewardAddend, SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.trainer.evaluator import EvaluationTask, Evaluator
from megatron_dapo.trainer.recorder import Phases, RunPaths
from megatron_dapo.types import Completion, Prompt, SamplingParams, Score
from megatron_dapo.untrusted import blamed_on, printable
from megatron_dapo.watch.signals import StopRequest

if TYPE_CHECKING:
    # It imports megatron-core, which takes seconds that a check of inputs does not have.
    from megatron_dapo.trainer.build_engines import Engines

logger = logging.getLogger(__name__)

SELF_TEST_PROMPTS = 64  # spread over the data set
MODEL_ENVIRONMENT = ["CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE"]  # of the processes of the preset reward_model
TRIAL_RESPONSE = "Answer: 42"  # that a reward function of samples is tried with


@dataclass
class RolloutContext:
    """Data, verifiers and collector, on rank 0."""

    inputs: ModelInputs
    scorer: Any  # VerifierPool or ShadowedPool
    collector: Collector
    stream: PromptStream
    prompts: tuple[Prompt, ...]
    evaluation: EvaluationTask | None

    def disagreement_share(self) -> float:
        """Return the share of responses so far that the shadow verifier scored otherwise; 0 without one."""
        if not isinstance(self.scorer, ShadowedPool):
            return 0.0
        statistics = self.scorer.statistics()
        return statistics.num_disagreements / max(1, statistics.num_compared)


def build_rollout_context(
    config: Config, engine: CollectiveEngine, phases: Phases, files: Files, stack: ExitStack
) -> RolloutContext:
    """Return what rank 0 collects with; `stack` closes the verifiers' processes."""

    def on_progress(progress: CollectProgress) -> None:
        phases.show("generate", progress.num_accepted, progress.num_groups)

    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    scorer = stack.enter_context(_scorer(config, files))
    pool = scorer.primary if isinstance(scorer, ShadowedPool) else scorer
    prompts, examples = _prompts(config, inputs, pool)
    # Its own seed: two runs with different run.seed can see the prompts in one order.
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
    )
    sample_scorer = SampleScorer(scorer, inputs.decode, reward_addends(config.reward), scorer)
    book = PromptBook({prompt.prompt_id: prompt for prompt in prompts} | injected, tuple(fresh.values()))
    collector_inputs = CollectorInputs(stream, book, engine, sample_scorer, on_progress)
    collector: Collector
    if config.rollout.responses == "given":
        collector = ExampleCollector(collector_inputs, examples)
    elif config.algorithm.name == "tppo":
        collector = WindowCollector(collector_inputs, config.rollout, config.window, sampling, config.run.seed)
    else:
        collector = GroupCollector(collector_inputs, config.rollout, sampling, config.run.seed)
    evaluation = _evaluation_task(config, inputs, pool, files)
    return RolloutContext(inputs, scorer, collector, stream, prompts, evaluation)


def _prompts(config: Config, inputs: ModelInputs, pool: Any) -> tuple[tuple[Prompt, ...], Mapping[str, Example]]:
    """Return the training prompts, and their examples by id where responses are given."""
    data = config.data
    if config.rollout.responses == "sampled":
        return load_train_dataset(config, inputs, pool).prompts, {}
    template = prompt_template(data, inputs.tokenizer)
    limits = data.max_prompt_tokens, config.rollout.max_response_tokens
    dataset = load_examples(data.train_paths, template, inputs.stop_tokens, *limits)
    return tuple(example.prompt for example in dataset.examples), dataset.by_id


def _fresh_prompts(config: Config, inputs: ModelInputs) -> dict[str, FreshPrompts]:
    """Return the prompts that are made anew for each epoch, by the names of their sources."""
    template = prompt_template(config.data, inputs.tokenizer)
    limit = config.data.max_prompt_tokens
    return {one.name: FreshPrompts(one, template, limit) for one in train_sources(config.data) if one.is_fresh}


def prompt_injection(
    config: Config, prompts: Sequence[Prompt], inputs: ModelInputs
) -> tuple[Injection | None, dict[str, Prompt]]:
    """Return the choice of rewrites of prompts, and these by id; None and none without templates."""
    section = config.data.injection
    if not section.templates:
        return None, {}
    template = prompt_template(config.data, inputs.tokenizer)
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
    """Return the verifier pool, with a shadow pool beside it if reward.shadow_verifier names one."""
    primary = open_verifier_pool(config.reward)
    if not config.reward.shadow_verifier:
        return primary
    path = RunPaths(config.run.output_dir).disagreements
    files.make_directory(path.parent)

    def write(disagreement: Disagreement) -> None:
        files.append(path, printable(json.dumps(disagreement.record(), ensure_ascii=False)) + "\n")

    return ShadowedPool(primary, open_verifier_pool(config.reward, config.reward.shadow_verifier), write)


def reward_addends(reward: RewardConfig) -> dict[str, RewardAddend]:
    """Return the parts of a response's reward beside the verifier's, by name."""
    length, perplexity, form = reward.overlong_punishment, reward.perplexity_penalty, reward.format

    def overlong(completion: Completion, text: str, score: Score) -> float:
        tokens = torch.tensor([completion.num_tokens])
        return float(soft_overlong_penalty(tokens, length.max_length, length.cache_length, length.factor)[0])

    def improbable(completion: Completion, text: str, score: Score) -> float:
        # Of the policy that sampled it: they come with the response, and no gradient flows through a reward.
        nll = -torch.from_numpy(completion.logprobs).double().mean()[None] if completion.num_tokens else torch.zeros(1)
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
    if not config.data.eval_paths:
        return None
    dataset = load_eval_dataset(config, inputs, pool)
    protocol = evaluation_protocol(config, str(config.model.path), dataset, inputs.stop_tokens, pool.version)
    return EvaluationTask(dataset, protocol, pool, inputs, RunPaths(config.run.output_dir).evaluations, files)


def build_collector(
    config: Config, context: RolloutContext, engines: Engines, stop: StopRequest, stack: ExitStack
) -> AsyncCollector:
    """Return rank 0's batches, collected ahead if the servers have devices of their own; `stack` ends the collection."""
    has_own_devices = config.rollout.engine == "sglang" and config.sglang.placement == "disaggregated"
    max_ahead = config.rollout.max_staleness if has_own_devices else 0
    recover = engines.servers.recover if engines.servers else None
    collector = AsyncCollector(
        context.collector,
        max_ahead,
        config.run.wait_timeout_seconds,
        recover,
        check_stop=stop.check,
        # The embedded engine repeats a collection bit for bit; servers do not, and what they generated is expensive.
        keep_stopped=config.rollout.engine != "embedded",
    )
    stack.callback(collector.close)
    return collector


def build_evaluator(
    config: Config,
    engines: Engines,
    context: RolloutContext | None,
    layout: ParallelLayout,
    phases: Phases,
    collector: AsyncCollector | None,
    stop: StopRequest,
) -> Evaluator | None:
    """Return the evaluator of data.eval_paths; None without such files. `context` and `collector`: on rank 0."""
    if not config.data.eval_paths:
        return None
    # Engines hold up to slots_per_rank sequences a rank; four times as many requests keep them full.
    max_in_flight = 4 * config.rollout.slots_per_rank * layout.world_size
    evaluation = context.evaluation if context else None
    return Evaluator(engines.engine, evaluation, max_in_flight, phases, collector, stop.check, engines.servers)


# ---- tokenizer, prompts, verifiers, protocol of evaluations


@dataclass(frozen=True)
class ModelInputs:
    """Tokenizer and stop tokens of a Hugging Face directory."""

    path: Path
    tokenizer: Any
    stop_tokens: StopTokens

    def decode(self, token_ids: Any) -> str:
        """Return the text of a response without special tokens."""
        return self.tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True)


def read_model_inputs(path: Path, trust_remote_code: bool) -> ModelInputs:
    """Read tokenizer and stop tokens of a Hugging Face directory."""
    check_special_tokens(path)
    with blamed_on(path, Exception):  # transformers and tokenizers raise what their parsers happen to
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        has_file = (path / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(str(path)).eos_token_id if has_file else None
        # Beside a vision tower the language model may be alone in naming it.
        eos = getattr(config, "eos_token_id", None) or config.get_text_config().eos_token_id
        stop_tokens = resolve_stop_token_ids(eos, generation, tokenizer.eos_token_id)
    logger.info("responses end at %s (%s)", list(stop_tokens.token_ids), stop_tokens.report())
    return ModelInputs(path, tokenizer, stop_tokens)


def open_verifier_pool(reward: RewardConfig, verifier: str | None = None) -> VerifierPool | MixturePool:
    """Start the processes that score this run's responses by `verifier` (default: reward.verifier, which may be a mixture)."""
    name = verifier or reward.verifier
    return _open_mixture(reward) if name == "mix" else _open_pool(reward, name)


def _open_pool(reward: RewardConfig, name: str) -> VerifierPool:
    # Each process gets the settings and the key of its preset only.
    presets = {name: getattr(reward, name).model_dump(mode="json")} if name in SET_PRESETS else {}
    keys = [own["key_variable"] for own in presets.values() if own.get("key_variable")]
    keys += MODEL_ENVIRONMENT if name == "reward_model" else []
    pool = VerifierPool(
        name,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_seconds,
        memory_limit_mb=reward.memory_limit_mb,
        file_limit_mb=reward.file_limit_mb,
        max_processes=reward.max_processes,
        more_environment=[*reward.environment, *keys],
        concurrency=reward.concurrency,
        reward_correct=reward.correct,
        reward_incorrect=reward.incorrect,
        batch_size=reward.batch_size,
        token_ids=reward.token_ids,
        presets=presets,
    )
    logger.info("verifier %s", pool.version)
    return pool


def _open_mixture(reward: RewardConfig) -> MixturePool:
    """Start the processes of every table [[reward.mix]]."""
    with ExitStack() as stack:  # closes those that started where one does not
        components = [
            MixtureComponent(name, stack.enter_context(_open_pool(reward, one.verifier)), one.weight)
            for name, one in zip(reward.part_names, reward.mix, strict=True)
        ]
        deciding = next((name for name, one in zip(reward.part_names, reward.mix, strict=True) if one.decides), None)
        mixture = MixturePool(components, deciding or components[0].name)
        stack.pop_all()
    return mixture


def load_train_dataset(config: Config, inputs: ModelInputs, pool: Any) -> PromptDataset:
    """Load the training prompts and check that they request the answer format that the verifier reads."""
    data = config.data
    template = prompt_template(data, inputs.tokenizer)
    dataset = load_sources(
        train_sources(data), template, data.max_prompt_tokens, data.deduplicate, pool.validate_answers
    )
    self_test(config, inputs, pool, dataset.prompts)
    first = template.describe(dataset.prompts[0].messages)
    logger.info("first prompt, template %s %s: %s", first["template"], first["template_hash"], first["text"])
    return dataset


def self_test(config: Config, inputs: ModelInputs, pool: Any, prompts: Sequence[Prompt]) -> None:
    """Check that prompts, some of those given, request the answer format that the verifier reads. ValueError where not.

    A function of samples may reward whatever it likes: it is called once, and has to return a reward. Of a mixture each component
    is tested.
    """
    if isinstance(pool, MixturePool):
        for component in pool.components:
            self_test(config, inputs, component.pool, prompts)
        return
    if pool.takes_sample:
        completion = Completion("trial", np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", ())
        score = pool.score_many([score_request("trial/0", prompts[0], completion, TRIAL_RESPONSE, pool)])["trial/0"]
        if score.outcome in ("error", "timeout"):
            raise ValueError(
                f"self-test: verifier {pool.verifier!r} called with the first prompt and the response {TRIAL_RESPONSE!r}: "
                f"{score.detail.get('error', score.outcome)}"
            )
        logger.info("self-test: verifier %s rewards a trial response by %g", pool.verifier, score.reward)
        return
    # Spread over the data set: files of different sources may ask for different formats.
    checked = prompts[:: max(1, len(prompts) // SELF_TEST_PROMPTS)]
    texts = [(inputs.tokenizer.decode(list(prompt.token_ids)), prompt.answer) for prompt in checked]
    report = check_contract(texts, pool, pool.verifier, config.reward.answer_format)
    logger.info(
        "self-test: verifier %s reads %s in %d prompts",
        pool.verifier,
        " and ".join(report.formats),
        report.num_prompts,
    )


def load_eval_dataset(config: Config, inputs: ModelInputs, pool: VerifierPool | MixturePool) -> PromptDataset:
    """Load the held-out problems, each once."""
    template = prompt_template(config.data, inputs.tokenizer)
    return load_eval_sources(eval_sources(config.data), template, config.data.max_prompt_tokens, pool.validate_answers)


def evaluation_protocol(
    config: Config, model: str, dataset: PromptDataset, stop_tokens: StopTokens, verifier_version: str
) -> EvaluationProtocol:
    """Return the record of everything besides the model that affects an evaluation's score. The version is the embedded engine's:
    only a server that runs tells its own."""
    evaluation, report = config.evaluation, dataset.report
    return EvaluationProtocol(
        model=model,
        dataset_path=", ".join(path for path, _ in report.files),
        dataset_sha256=", ".join(digest for _, digest in report.files),
        num_dataset_rows=report.num_rows,
        num_problems=report.num_prompts,
        num_samples=evaluation.num_samples,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        max_new_tokens=config.evaluation_response_tokens,
        stop_token_ids=stop_tokens.token_ids,
        seed=config.run.seed,
        engine=config.rollout.engine,
        engine_version=f"transformers {importlib.metadata.version('transformers')}",
        chat_template_sha256=report.template_hash,
        verifier=config.reward.verifier,
        verifier_version=verifier_version,
    )
