"""Worker of test_one_sample.py: prompts through a real engine, verifier process, collector, learner and actor."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megatron_dapo
from megatron_dapo.config import config_from_dict
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.rewards.build import open_verifier_pool
from megatron_dapo.rollout.async_collector import AsyncCollector
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.group_collector import GroupCollector
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.trainer.build import build_actor, build_learner
from megatron_dapo.trainer.connect_engines import connect_engines
from megatron_dapo.trainer.recorder import Phases
from megatron_dapo.trainer.rollout import Rollout
from megatron_dapo.trainer.topology import run_topology
from megatron_dapo.types import MicroBatch, Prompt, SamplingParams

PACKAGE = Path(megatron_dapo.__file__).parent
MARKER = (41, 7, 29, 53)  # token ids of the traced prompt
NAME = "000000000000/0"  # the prompt's first response
_DEPTH = 4  # containers and records inside one another


class SampleTrace:
    """Files whose functions hold a record of the traced sample, and the records' types, in the order of first sight.

    A record is a dataclass or named tuple with the prompt's tokens or the response's name among its fields.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.types: dict[str, None] = {}
        self._is_over = False
        self._bytes = {np.dtype(kind): np.array(MARKER, kind).tobytes() for kind in (np.int32, np.int64)}

    def __call__(self, frame: Any, event: str, result: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if self._is_over or event not in ("call", "return") or PACKAGE not in path.parents:
            return
        found = False
        for value in [*frame.f_locals.values(), result]:
            for record in self._records(value, _DEPTH):
                found = True
                if not type(record).__name__.startswith("_"):  # a private type does not leave its module
                    self.types.setdefault(type(record).__name__)
                self._is_over |= isinstance(record, MicroBatch)
        if found:
            self.files.setdefault(str(path.relative_to(PACKAGE)))

    def _records(self, value: Any, depth: int) -> Iterator[Any]:
        """Yield the records of the sample in `value`, inner ones first."""
        if depth == 0 or isinstance(value, type):
            return
        if is_dataclass(value) or hasattr(value, "_fields"):
            names = [entry.name for entry in fields(value)] if is_dataclass(value) else value._fields
            parts = [getattr(value, name, None) for name in names]
            inner = [record for part in parts for record in self._records(part, depth - 1)]
            yield from inner
            if inner or any(map(self._is_marked, parts)):
                yield value
        elif isinstance(value, Mapping):
            for part in list(value.values()):
                yield from self._records(part, depth - 1)
        elif isinstance(value, (list, tuple)):
            for part in value:
                yield from self._records(part, depth - 1)

    def _is_marked(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            value = np.zeros(0) if value.is_meta or value.dtype.is_floating_point else value.cpu().numpy()
        if isinstance(value, np.ndarray):
            return value.dtype in self._bytes and self._bytes[value.dtype] in value.tobytes()
        if isinstance(value, (str, list)):
            return value == NAME or value == list(MARKER)
        return isinstance(value, tuple) and (value == MARKER or NAME in value)


def trace(arguments: dict[str, Any]) -> dict[str, list[str]]:
    """Sample, score and pack two groups of two responses; return the files and types up to the micro-batch."""
    config = config_from_dict(
        {
            "model": {"path": arguments["model"], "allow_random_init": True},
            "data": {"train_paths": ["rows.jsonl"], "max_prompt_tokens": 8},
            "rollout": {
                "prompts_per_step": 2,
                "group_size": 2,
                "max_response_tokens": 4,
                "filter_groups": False,
                "slots_per_rank": 4,
            },
            "training": {"mini_batch_prompts": 2, "micro_batch_tokens": 64},
            "run": {"total_steps": 1, "output_dir": arguments["output"]},
            "reward": {"num_workers": 1},
        }
    )
    topology, phases = run_topology(config), Phases()
    commands = Rank0Commands(topology.coordination)
    actor = build_actor(config, topology)
    engines = connect_engines(config, topology.policy, commands, None, actor)
    learner = build_learner(config, actor, topology, phases)
    prompts = {f"p{i}": Prompt(f"p{i}", ({"role": "user", "content": "?"},), (*MARKER[:-1], 53 + i), "1") for i in range(2)}
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(2,))
    found = SampleTrace()
    with ExitStack() as stack:
        pool = stack.enter_context(open_verifier_pool(config.reward))
        scorer = SampleScorer(pool, lambda tokens: " ".join(map(str, tokens)), {}, pool)
        inputs = CollectorInputs(PromptStream(list(prompts), 0), prompts, engines.engine, scorer)
        collector = AsyncCollector(GroupCollector(inputs, config.rollout, sampling, 1), 0, 60.0)
        collector.before_update()
        engines.publisher.publish(0)
        collector.after_update(0)
        rollout = Rollout(engines, collector, topology.coordination, filter_overlong=False)
        threading.setprofile(found)
        sys.setprofile(found)
        try:
            batch = rollout.generate(2, lambda samples: learner.share(samples, 0))
            learner.learn(batch.samples, 0)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert "MicroBatch" in found.types, "the sample was not packed"
    return {"files": list(found.files), "types": list(found.types)}
