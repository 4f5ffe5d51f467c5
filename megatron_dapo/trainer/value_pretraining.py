"""`megatron-dapo pretrain-value`: train the critic on the policy's returns before the policy trains (VC-PPO, VAPO).

This is the usual training loop with a learner that trains only the critic: the policy generates, the Monte-Carlo
returns of its responses are the targets, and the run ends when explained variance and loss stop improving. A check
confirms that the policy did not change. Checkpoints and resume work as in any run.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping

import torch

from megatron_dapo.algorithms.stop_rule import StopRule
from megatron_dapo.config.loader import LoadedConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.parallel.collectives import max_over
from megatron_dapo.telemetry.summary import EXPLAINED
from megatron_dapo.trainer.build import critic_start
from megatron_dapo.trainer.context import RunProcess
from megatron_dapo.trainer.run import PreparedRun, prepared_run
from megatron_dapo.watch.attempts import STOPPED_BY_SIGNAL

logger = logging.getLogger(__name__)

NUM_AVERAGED = 5  # newest train steps whose explained variance is reported


def run_value_pretraining(loaded: LoadedConfig, process: RunProcess) -> str:
    """Pretrain the critic of a `pretraining_config` into <run.output_dir>/critic; return why it ended.

    Every process of the run calls it.
    """
    start = time.perf_counter()
    _require_weights(loaded.config)
    section = loaded.config.value_pretraining
    stop_rule = StopRule(section.min_steps, section.explained_variance_slope, section.loss_slope)
    with prepared_run(loaded, process, stop_rule) as run:
        critic = run.parts.learner.critic
        assert critic is not None, "a configuration of value pretraining has a critic"
        # If the policy changed, the critic would silently learn the returns of another policy.
        before = _policy_digest(run)
        reason = run.loop.run()
        _require_unchanged(before, _policy_digest(run))
        newest = [explained for explained, _ in critic.counters.history[-NUM_AVERAGED:]]
        explained = sum(newest) / max(1, len(newest))
        exports = {} if reason == STOPPED_BY_SIGNAL else {"critic": run.export_critic()}
        run.summarize(reason, exports, time.perf_counter() - start, {EXPLAINED: explained})
        logger.info(
            "value pretraining: %s after %d steps; explained variance %.3f (mean of the last %d steps, each on responses "
            "the critic had not seen); the policy's weights are unchanged",
            reason,
            run.progress.train_step,
            explained,
            len(newest),
        )
    return reason


def _require_weights(config: Config) -> None:
    """Raise ValueError if the critic could not be exported: its files copy the format of those it started from."""
    start = critic_start(config)
    if not any(start.glob("*.safetensors")):
        raise ValueError(
            f"value pretraining: {start} holds no weights: the critic would learn the returns of a random policy, and its export "
            "copies the format of those files; set model.path to a model with weights"
        )


def _policy_digest(run: PreparedRun) -> str:
    """Return the digest of this rank's part of the policy."""
    actor = run.parts.learner.local_actor
    return weights_digest(actor.named_local_parameters() if actor else {})


def weights_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over the names and bytes of this rank's parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        # View as bytes, because numpy has no bfloat16.
        digest.update(parameter.detach().to("cpu", copy=True).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_unchanged(before: str, after: str) -> None:
    if float(max_over({"changed": float(before != after)})["changed"]):
        raise RuntimeError(
            "the policy's weights changed during value pretraining: this is a bug in megatron_dapo, please report it"
        )
