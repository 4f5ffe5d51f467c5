"""Engines of several processes driven by rank 0: same samples as one engine, deterministic order, failures reach every
rank.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launcher import run_distributed, target_in
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_dapo.engines.distributed_embedded import DistributedEmbeddedEngine
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.rank0_commands import Rank0Commands
from megatron_dapo.types import GenerationRequest, SamplingParams

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def make_engine() -> EmbeddedEngine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**CONFIG))
    engine = EmbeddedEngine(model.config, EmbeddedEngineSettings(max_slots=8, max_length=96, ticks_per_poll=4))
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(5 * dict(model.named_parameters())[name].detach() if tensor.dim() > 1 else 1.0)
    engine.set_policy_version(3)
    return engine


def distributed_engine() -> DistributedEmbeddedEngine:
    coordination = Coordination(dist.group.WORLD)
    return DistributedEmbeddedEngine(make_engine(), coordination, Rank0Commands(coordination))


def make_requests() -> list[GenerationRequest]:
    rng = random.Random(0)
    requests = []
    for group in range(6):
        prompt = tuple(rng.randrange(3, 61) for _ in range(rng.randint(1, 20)))
        for index in range(4):
            sampling = SamplingParams(max_new_tokens=rng.randint(1, 40), stop_token_ids=(2, 5))
            requests.append(GenerationRequest(f"{group}/{index}", prompt, sampling, seed=100 * group + index))
    return requests


def collect(engine: DistributedEmbeddedEngine, requests: list[GenerationRequest]) -> list:
    """Submit in two waves, drain, then abort a third wave in the middle."""
    engine.submit(requests[:12])
    stream = engine.poll()
    engine.submit(requests[12:])
    while engine.num_unfinished:
        stream += engine.poll()
    engine.submit(requests[:4])
    stream += engine.poll() + engine.abort()
    assert engine.num_unfinished == 0 and engine.poll() == []
    return stream


def two_rounds(rank: int, directory: Path) -> None:
    engine = distributed_engine()
    rounds = [engine.run_on_rank0(lambda: collect(engine, make_requests())) for _ in range(2)]
    assert engine.policy_version == 3
    if rank == 0:
        (directory / "rounds.json").write_text(
            json.dumps([[asdict(done) for done in stream] for stream in rounds], default=np.ndarray.tolist)
        )


def failing_rank(rank: int, directory: Path) -> None:
    engine = distributed_engine()
    if rank == 1:
        engine.parameters_by_name()["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(RuntimeError, match="rank 1: RuntimeError: policy version 3 gave logits that are not finite"):
        engine.run_on_rank0(lambda: collect(engine, make_requests()))
    (directory / f"failing_rank.{rank}").touch()


def failing_driver(rank: int, directory: Path) -> None:
    engine = distributed_engine()

    def body() -> None:
        engine.submit(make_requests())
        engine.poll()
        raise ValueError("no prompts left")

    with pytest.raises((ValueError, RuntimeError), match="no prompts left"):
        engine.run_on_rank0(body)
    (directory / f"failing_driver.{rank}").touch()


def three_ranks(directory: str) -> None:
    for scenario in (two_rounds, failing_rank, failing_driver):
        scenario(dist.get_rank(), Path(directory))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of three ranks after all scenarios (one start of processes serves all tests)."""
    directory = tmp_path_factory.mktemp("ranks")
    run_distributed(target_in(__file__, "three_ranks"), 3, str(directory))
    return directory


def test_lockstep_gives_the_samples_of_one_engine(directory: Path) -> None:
    first, second = json.loads((directory / "rounds.json").read_text())
    assert first == second
    alone = make_engine()
    alone.submit(make_requests())
    expected = {}
    while alone.num_unfinished:
        expected |= {done.request_id: done for done in alone.poll()}
    finished, aborted = first[: len(expected)], first[len(expected) :]
    assert sorted(done["request_id"] for done in finished) == sorted(expected)
    for done in finished:
        assert done["token_ids"] == expected[done["request_id"]].token_ids.tolist()
        assert done["logprobs"] == pytest.approx(expected[done["request_id"]].logprobs, abs=1e-4)
        assert done["finish_reason"] == expected[done["request_id"]].finish_reason
        assert [v["version"] for v in done["versions"]] == [3]
    assert len(aborted) == 4
    for done in aborted:
        assert done["token_ids"] == expected[done["request_id"]].token_ids[: len(done["token_ids"])].tolist()


@pytest.mark.parametrize("scenario", ["failing_rank", "failing_driver"])
def test_a_failure_reaches_every_rank(scenario: str, directory: Path) -> None:
    assert [(directory / f"{scenario}.{rank}").exists() for rank in range(3)] == [True] * 3
