"""Which model is on the device in which phase of a train step, where models leave it while they rest.

    generate, evaluate      neither: the memory is the engines'
    values, train_critic    the critic; its optimizer state in the latter alone
    logprobs, train         policy and reference; the policy's optimizer state in the latter alone
    weight_sync             the policy's weights

What a phase needs comes back before it, and what it does not need leaves, so that at most one of the two models is there
at a time. A phase of a model that other processes hold moves nothing here, nor do other phases: a checkpoint is written from
where the tensors are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megatron_dapo.megatron.host_memory import Moved
from megatron_dapo.megatron.trained_model import EVERYTHING, TrainedModel

logger = logging.getLogger(__name__)

POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"
WEIGHTS = ("weights",)
MEBIBYTE = 1 << 20
# Phase -> what it needs of which model; models that are not named leave.
NEEDED: Mapping[str, Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "generate": {},
        "evaluate": {},
        "values": {CRITIC: WEIGHTS},
        "train_critic": {CRITIC: EVERYTHING},
        "logprobs": {POLICY: WEIGHTS, REFERENCE: WEIGHTS},
        "train": {POLICY: EVERYTHING, REFERENCE: WEIGHTS},
        "weight_sync": {POLICY: WEIGHTS},
    }
)


class ModelMoves:
    """The models of this process by what they are. Call it with the name of every phase before the phase."""

    def __init__(self, models: Mapping[str, TrainedModel]) -> None:
        self._models = dict(models)
        self._told = Moved()

    @property
    def moved(self) -> Moved:
        """By all models so far."""
        return sum((model.moved for model in self._models.values()), Moved())

    def __call__(self, phase: str) -> None:
        needed = NEEDED.get(phase)
        if needed is None or needed and not needed.keys() & self._models.keys():
            return
        for name, model in self._models.items():
            model.offload(keep=needed.get(name, ()))
        for name, kinds in needed.items():
            if name in self._models:
                self._models[name].onload(kinds)
        if phase == "generate":
            self._tell()

    def _tell(self) -> None:
        """Once a train step: what moved since the last time."""
        now, before = self.moved, self._told
        self._told = now
        logger.info(
            "offload: since the last train step %.1f MiB left the device and %.1f MiB came back, in %.3f s",
            (now.offloaded - before.offloaded) / MEBIBYTE,
            (now.onloaded - before.onloaded) / MEBIBYTE,
            now.seconds - before.seconds,
        )
