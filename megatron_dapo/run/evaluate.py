"""Evaluates a Hugging Face directory without training, with the recipe's protocol.

rollout.engine = "embedded"    transformers inside this process
rollout.engine = "sglang"      SGLang servers of any tensor-parallel size, started here or given by sglang.urls
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.config import Config
from megatron_dapo.data.model_inputs import ModelInputs, read_model_inputs
from megatron_dapo.engines.base import RolloutEngine
from megatron_dapo.engines.embedded import EmbeddedEngine
from megatron_dapo.engines.sglang.standalone import serving_engine, started
from megatron_dapo.engines.sglang.keys import create_key
from megatron_dapo.engines.sglang.server import AttachedServer, EngineStartError, Expectation
from megatron_dapo.evaluation.build import evaluation_protocol, load_eval_dataset
from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.evaluation.runner import EvaluationProgress, evaluate, sample_and_score
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.rewards.build import open_verifier_pool
from megatron_dapo.rollout.scoring import RewardAddend
from megatron_dapo.run.derive import with_rollout_sampling
from megatron_dapo.trainer.build_episodes import episode_engine, template_proof
from megatron_dapo.trainer.build_rollout import load_train_dataset, reward_addends
from megatron_dapo.trainer.start_engines import build_local_engine, client_timeouts, server_settings
from megatron_dapo.types import Group, ScoredSample
from megatron_dapo.watch.heartbeat import watched_alone

logger = logging.getLogger(__name__)

_NUM_REPORTS = 20  # log lines of an evaluation's progress


def evaluate_model(config: Config, name: str = "") -> EvaluationResult:
    """Estimate avg@k, pass@k and cons@k of the model in model.path by the evaluation section.

    name: the model as the result records it; default: its directory.
    ValueError for a configuration or data that cannot be used, RuntimeError if servers fail.
    """
    with watched_alone("evaluate"):
        return _evaluate(config, config.model.path, name or str(config.model.path))


def _evaluate(config: Config, model_dir: Path, name: str) -> EvaluationResult:
    inputs = read_model_inputs(model_dir, config.model.trust_remote_code)
    with open_verifier_pool(config.reward) as pool:
        # Read before servers start, so that an unreadable file fails at once.
        dataset = load_eval_dataset(config, inputs, pool)
        protocol = evaluation_protocol(config, name, dataset, inputs.stop_tokens, pool.version)
        with playing_engine(config, model_dir, inputs) as (engine, max_in_flight, version):
            protocol = replace(protocol, engine_version=version or protocol.engine_version)
            progress = ProgressLog(len(dataset.prompts) * protocol.num_samples)
            return evaluate(
                dataset.prompts,
                engine,
                pool,
                inputs.decode,
                protocol,
                progress=progress.report,
                max_in_flight=max_in_flight,
            )


def try_prompts(config: Config, num_prompts: int, num_samples: int) -> list[Group]:
    """Return groups of responses of the untrained model to training prompts from all over the data, with their rewards.

    ValueError for a configuration or data that cannot be used, RuntimeError if servers fail.
    """
    with watched_alone("try"):
        inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
        with open_verifier_pool(config.reward) as pool:
            dataset = load_train_dataset(config, inputs, pool)
            chosen = dataset.prompts[:: max(1, len(dataset) // num_prompts)][:num_prompts]
            sampled = with_rollout_sampling(config, num_samples)
            protocol = evaluation_protocol(sampled, str(config.model.path), dataset, inputs.stop_tokens, pool.version)
            with playing_engine(config, config.model.path, inputs) as (engine, max_in_flight, _):
                problems, rows = sample_and_score(
                    chosen, engine, pool, inputs.decode, protocol, max_in_flight=max_in_flight
                )
    addends = reward_addends(config.reward)
    return [
        Group(str(number), problem.prompt, tuple(_with_addends(one, addends) for one in row), 0, 0)
        for number, (problem, row) in enumerate(zip(problems, rows, strict=True))
    ]


def _with_addends(sample: ScoredSample, addends: Mapping[str, RewardAddend]) -> ScoredSample:
    """Return a sample with the reward terms that a run adds to the verifier's."""
    added = {name: addend(sample.completion, sample.text, sample.score) for name, addend in addends.items()}
    return replace(sample, reward_parts={**sample.reward_parts, **added})


class ProgressLog:
    """A log line for each twentieth of an evaluation."""

    def __init__(self, num_total: int) -> None:
        self._step = max(1, num_total // _NUM_REPORTS)
        self._next = self._step

    def report(self, seen: EvaluationProgress) -> None:
        """Log the progress if another twentieth is finished."""
        if seen.num_finished >= self._next:
            self._next = seen.num_finished + self._step
            mean = seen.num_tokens / seen.num_finished
            logger.info("%d of %d responses, %.0f tokens each", seen.num_finished, seen.num_total, mean)


@contextmanager
def playing_engine(
    config: Config, model_dir: Path, inputs: ModelInputs
) -> Iterator[tuple[RolloutEngine, int, str]]:
    """Return what `opened_engine` does; with an environment the engine plays episodes.

    ValueError if the chat template or the environment cannot be used.
    """
    proof = template_proof(config, inputs)
    with opened_engine(config, model_dir) as (engine, max_in_flight, version):
        with episode_engine(config, proof, engine) as playing:
            yield playing, max_in_flight, version


@contextmanager
def opened_engine(config: Config, model_dir: Path) -> Iterator[tuple[RolloutEngine, int, str]]:
    """Return the engine, the number of requests that keep it full, and its version if that is known only now."""
    if config.rollout.engine == "embedded":
        yield loaded_engine(config, model_dir), 4 * config.rollout.slots_per_rank, ""
        return
    with _servers(config) as servers:
        running = config.sglang.max_running_requests
        vocab_size = read_architecture(model_dir).vocab_size
        version = f"sglang {servers[0].info.api_version.version}" if servers[0].info else ""
        with serving_engine(servers, running, vocab_size, client_timeouts(config)) as engine:
            # Twice what they run at a time: a server that finishes one finds the next.
            yield engine, 2 * running * len(servers), version


@contextmanager
def _servers(config: Config) -> Iterator[Sequence[AttachedServer]]:
    sglang = config.sglang
    if sglang.urls:
        settings = server_settings(config, Path(sglang.api_key_file), Path(), 0)
        expectation, limit_s = Expectation.of(settings), sglang.start_timeout_seconds
        attached = [
            AttachedServer(url, settings.key_file, expectation, index, limit_s) for index, url in enumerate(sglang.urls)
        ]
        wanted = str(config.model.path.resolve())
        for server in attached:
            served = server.wait_until_healthy().model_path
            if served != wanted:
                raise EngineStartError(
                    f"{server.url} serves {served}, not {wanted}: start it from that directory, or pass --model {served}"
                )
        yield attached
        return
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        directory = Path(scratch)
        key_file = create_key(directory)
        firsts = [index * sglang.tp_size for index in range(num_servers(config))]
        with started([server_settings(config, key_file, directory, first) for first in firsts]) as servers:
            logger.info("%d servers of %d ranks serve %s", len(servers), sglang.tp_size, config.model.path)
            yield servers


def num_servers(config: Config) -> int:
    """Return the servers to start here: as many as fit this machine's GPUs, sglang.servers_per_node on CPUs.

    ValueError if one server needs more GPUs than there are.
    """
    sglang = config.sglang
    if not torch.cuda.is_available():
        return sglang.servers_per_node
    num_gpus = torch.cuda.device_count()
    if num_gpus < sglang.tp_size:
        raise ValueError(
            f"a server of sglang.tp_size = {sglang.tp_size} needs as many GPUs, this machine has {num_gpus}: "
            f"--set sglang.tp_size={num_gpus}"
        )
    return num_gpus // sglang.tp_size


def loaded_engine(config: Config, model_dir: Path) -> EmbeddedEngine:
    """Return an embedded engine that holds the directory's weights."""
    engine = build_local_engine(config, model_dir)
    with HFCheckpoint(model_dir) as source, torch.no_grad():
        for name, parameter in engine.parameters_by_name().items():
            parameter.copy_(source.read_tensor(name))
    engine.set_policy_version(0)
    return engine
