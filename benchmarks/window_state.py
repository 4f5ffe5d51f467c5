"""Cost of unfinished responses in a checkpoint: tokens and log-probs as tensors, against the whole state in JSON.

A collector of windows (T-PPO) is filled with responses that are all unfinished, by an engine that draws random tokens and
log-probs, and its state is written and read as a checkpoint does it (`collector.json` and `collector.safetensors`), then
as one JSON file. Files go to a temporary directory; whatever the machine caches is cached.

    python benchmarks/window_state.py [--json] [--tiny] [--groups 64] [--group-size 16] [--tokens 12288]

`size_ratio`, `write_ratio`, `read_ratio`: tensors / JSON. The defaults are an eighth of 512 x 16 responses.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import options
import torch

from megatron_dapo.checkpoints.store import CheckpointStore, CheckpointWriter
from megatron_dapo.config.algorithm_schema import WindowConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.rollout.collector import CollectorInputs
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.serialization import join_state, split_state
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.types import Completion, GenerationRequest, Prompt, SamplingParams, VersionRange

VOCAB_SIZE = 151936  # Qwen2's: the size in JSON depends on the digits of the ids
PROMPT_TOKENS = 200


class EndlessEngine:
    """Every response runs into the limit of its window at once."""

    def __init__(self) -> None:
        self.policy_version = 0
        self._waiting: list[GenerationRequest] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting += requests

    def poll(self) -> list[Completion]:
        waiting, self._waiting = self._waiting, []
        return [self._completion(request) for request in waiting]

    def abort(self) -> list[Completion]:
        return []

    def _completion(self, request: GenerationRequest) -> Completion:
        count = request.sampling.max_new_tokens
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        tokens = torch.randint(0, VOCAB_SIZE, (count,), generator=generator)
        logprobs = torch.randn(count, generator=generator).abs().neg()  # float32, as engines give them
        versions = (VersionRange(0, count, self.policy_version),)
        return Completion(request.request_id, tokens.int().numpy(), logprobs.numpy(), "length", versions)


class NoVerifier:
    def score_many(self, items: Any) -> dict[Any, Any]:
        assert not list(items), "no response is finished"
        return {}


def filled_collector(num_groups: int, group_size: int, num_tokens: int) -> WindowCollector:
    """Return a collector whose pool holds `num_groups` x `group_size` unfinished responses of `num_tokens`."""
    prompts = {str(i): Prompt(str(i), (), tuple(range(PROMPT_TOKENS)), "1") for i in range(num_groups)}
    sampling = SamplingParams(max_new_tokens=2 * num_tokens)  # twice the window: no response ends in it
    inputs = CollectorInputs(
        stream=PromptStream(list(prompts), seed=0),
        prompts=prompts,
        engine=EndlessEngine(),
        scorer=SampleScorer(NoVerifier(), lambda token_ids: ""),
    )
    config, window = RolloutConfig(group_size=group_size), WindowConfig(tokens=num_tokens)
    collector = WindowCollector(inputs, config, window, sampling, seed=0)
    batch = collector.collect(num_groups)
    assert len(batch.groups) == num_groups, f"{len(batch.groups)} groups of {num_groups}"
    return collector


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(wall seconds, result)."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def as_tensors(collector: WindowCollector, directory: Path) -> tuple[dict[str, float], Any]:
    """Write and read a checkpoint's two files; return the figures and the state."""
    names = ("collector.json", "collector.safetensors")
    store = CheckpointStore(directory, keep=1)
    store.begin(0)

    def write() -> None:
        writer = CheckpointWriter()
        document, tensors = split_state(collector.state_dict())
        writer.save_json(names[0], document)
        writer.save_tensors(names[1], tensors)
        store.write(0, writer)
        store.commit(0)

    def read() -> Any:
        checkpoint = store.open(0)
        return join_state(checkpoint.load_json(names[0]), checkpoint.load_tensors(names[1]))

    return _figures(write, read, [store.path(0) / name for name in names])


def as_json(collector: WindowCollector, directory: Path) -> tuple[dict[str, float], Any]:
    """Write and read one JSON file; return the figures and the state."""
    path = directory / "state.json"

    def write() -> None:
        path.write_text(json.dumps(collector.state_dict(), default=np.ndarray.tolist), "utf-8")

    return _figures(write, lambda: json.loads(path.read_text("utf-8")), [path])


def _figures(write: Callable[[], Any], read: Callable[[], Any], paths: Sequence[Path]) -> tuple[dict[str, float], Any]:
    write_seconds, _ = timed(write)
    read_seconds, state = timed(read)  # Both sides read from the page cache.
    size = sum(path.stat().st_size for path in paths) / 1e9
    return {"gigabytes": size, "write_seconds": write_seconds, "read_seconds": read_seconds}, state


def measure(num_groups: int, group_size: int, num_tokens: int) -> dict[str, Any]:
    """Write and read one collector both ways. Raises AssertionError if the two states differ."""
    collector = filled_collector(num_groups, group_size, num_tokens)
    with tempfile.TemporaryDirectory() as directory:
        tensors, from_tensors = as_tensors(collector, Path(directory))
        plain, from_json = as_json(collector, Path(directory))
    # JSON is the reference: what tensors lose shows here.
    plain_form = json.loads(json.dumps(from_tensors, default=np.ndarray.tolist))
    assert plain_form == from_json, "tensors and JSON give different states"
    ratios = {
        f"{name}_ratio": tensors[figure] / plain[figure]
        for name, figure in (("size", "gigabytes"), ("write", "write_seconds"), ("read", "read_seconds"))
    }
    return {**ratios, "responses": num_groups * group_size, "tokens": num_tokens, "tensors": tensors, "json": plain}


def main() -> None:
    parser = options.parser(__doc__, "4 responses of 64 tokens")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=12288, help="of a response so far")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.groups, arguments.group_size, arguments.tokens = 2, 2, 64
    result = {"benchmark": "window_state", **measure(arguments.groups, arguments.group_size, arguments.tokens)}
    options.show(result, arguments)


if __name__ == "__main__":
    main()
