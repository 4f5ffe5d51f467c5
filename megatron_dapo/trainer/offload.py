"""Lets the models of one process take turns on the device.

    models.offload_all()                                              the memory is the engines': generate, evaluate
    with models.on_device(CRITIC):                                    values
    with models.on_device(CRITIC, training=CRITIC):                   the critic's optimizer steps
    with models.on_device(POLICY, REFERENCE):                         log-probs
    with models.on_device(teacher_key(name), POLICY, training=POLICY):    a teacher's hidden states, before a step
    with models.on_device(POLICY, REFERENCE, training=POLICY):        the policy's optimizer steps
    with models.on_device(POLICY):                                    weight sync

model.offload, critic.offload and distillation.offload set what a model keeps in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron_dapo.megatron.host_memory import Moved
from megatron_dapo.megatron.trained_model import EVERYTHING, TrainedModel
from megatron_dapo.rounding import MIB
from megatron_dapo.trainer.recorder import Phases

logger = logging.getLogger(__name__)

POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"


def teacher_key(name: str) -> str:
    """Return the key of a teacher among a process's models."""
    return f"teacher {name}"


class DeviceModels:
    """Brings models to the device before use, and offloads the others to make room."""

    def __init__(self, models: Mapping[str, TrainedModel], phases: Phases) -> None:
        """`models`: this process's offloaded models, keyed by POLICY, REFERENCE, CRITIC and teachers'; empty if all stay."""
        self._models = dict(models)
        self._phases = phases
        self._logged = Moved()

    @contextmanager
    def on_device(self, *names: str, training: str = "") -> Iterator[None]:
        """Bring the weights of the named models to the device, with gradients and optimizer of the one in `training`.

        The other models are offloaded first. Nothing moves at the end: a model stays until another one needs the room,
        so that two blocks in a row on one model copy nothing in between. Models of other processes are ignored.
        """
        # On separate ranks, waiting for the other side's model must not push this side's model off the device.
        here = [name for name in names if name in self._models]
        if here:
            self._move({name: EVERYTHING if name == training else ("weights",) for name in here})
        yield

    @property
    def is_offloading(self) -> bool:
        """True if tensors of a model move between the device and host memory."""
        return bool(self._models)

    def offload_all(self) -> None:
        """Offload every model, so that the engines get the memory."""
        if self._models:
            self._move({})

    def _move(self, needed: Mapping[str, tuple[str, ...]]) -> None:
        with self._phases.phase("offload"):
            for name, model in self._models.items():
                # `keep`: kinds of tensors that are needed now and would come straight back.
                model.offload(keep=needed.get(name, ()))
            # Load only after offloading, so that the device never holds both.
            for name, kinds in needed.items():
                self._models[name].onload(kinds)

    @property
    def moved(self) -> Moved:
        """Bytes and seconds of all moves so far."""
        return sum((model.moved for model in self._models.values()), Moved())

    def log_moved(self) -> None:
        """Log what moved since the last call."""
        if not self._models:
            return
        now, before = self.moved, self._logged
        self._logged = now
        logger.info(
            "offload: since the last train step %.1f MiB left the device and %.1f MiB came back, in %.3f s",
            (now.offloaded - before.offloaded) / MIB,
            (now.onloaded - before.onloaded) / MIB,
            now.seconds - before.seconds,
        )
