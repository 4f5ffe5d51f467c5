"""What a run reads before anything is built: tokenizer, stop tokens, prompts, and the protocol of its evaluations."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megatron_dapo.config.rollout_schema import RewardConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.data.dataset import PromptDataset, load_eval_prompts, load_prompts
from megatron_dapo.data.template import PromptTemplate, StopTokens, resolve_stop_token_ids
from megatron_dapo.evaluation.protocol import EvaluationProtocol
from megatron_dapo.rewards.pool import VerifierPool
from megatron_dapo.rewards.self_test import check_contract

logger = logging.getLogger(__name__)

SELF_TEST_PROMPTS = 64  # spread over the data set


@dataclass(frozen=True)
class ModelInputs:
    """What is read from the model folder besides weights."""

    folder: Path
    tokenizer: Any
    stop_tokens: StopTokens

    def decode(self, token_ids: Any) -> str:
        """Text of a response for people and verifiers; special tokens are left out."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


def read_model_inputs(folder: Path, trust_remote_code: bool) -> ModelInputs:
    """Tokenizer and stop tokens of a Hugging Face folder."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    has_file = (folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(str(folder)).eos_token_id if has_file else None
    stop_tokens = resolve_stop_token_ids(config.eos_token_id, generation, tokenizer.eos_token_id)
    logger.info("responses end at %s (%s)", list(stop_tokens.token_ids), stop_tokens.report())
    return ModelInputs(folder, tokenizer, stop_tokens)


def open_verifier_pool(reward: RewardConfig, verifier: str | None = None) -> VerifierPool:
    """The pool of processes that scores this run's responses, by `verifier` (default: the configured one)."""
    return VerifierPool(
        verifier or reward.verifier,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_seconds,
        memory_limit_mb=reward.memory_limit_mb,
        reward_correct=reward.correct,
        reward_incorrect=reward.incorrect,
    )


def load_train_dataset(config: Config, inputs: ModelInputs, pool: VerifierPool) -> PromptDataset:
    """Training prompts, after the start-up self-test: prompts ask for the format the verifier reads."""
    data = config.data
    dataset = load_prompts(
        data.train_paths,
        inputs.tokenizer,
        data.max_prompt_tokens,
        data.template,
        deduplicate=data.deduplicate,
        validate_answers=pool.validate_answers,
    )
    checked = dataset.prompts[:: max(1, len(dataset.prompts) // SELF_TEST_PROMPTS)]
    texts = [(inputs.tokenizer.decode(list(prompt.token_ids)), prompt.answer) for prompt in checked]
    report = check_contract(texts, pool, config.reward.verifier, config.reward.answer_format)
    logger.info(
        "self-test: verifier %s reads %s in %d prompts",
        config.reward.verifier,
        " and ".join(report.formats),
        report.num_prompts,
    )
    first = PromptTemplate(inputs.tokenizer, data.template).describe(dataset.prompts[0].messages)
    logger.info("first prompt, template %s %s: %s", first["template"], first["template_hash"], first["text"])
    return dataset


def load_eval_dataset(config: Config, inputs: ModelInputs, pool: VerifierPool) -> PromptDataset:
    """Held-out problems, each once."""
    return load_eval_prompts(
        config.data.eval_paths,
        inputs.tokenizer,
        config.data.max_prompt_tokens,
        config.data.template,
        validate_answers=pool.validate_answers,
    )


def evaluation_protocol(
    config: Config, model: str, dataset: PromptDataset, stop_tokens: StopTokens, verifier_version: str
) -> EvaluationProtocol:
    """Everything that moves an evaluation's score besides the model."""
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
