"""A dumped batch comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dapo.files.durable import HERE
from megatron_dapo.telemetry.batch_dump import dump_batch, load_batch
from megatron_dapo.types import TrainSample


def make_samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index, (prompt, response) in enumerate([(3, 5), (1, 1), (7, 0), (2, 9)]):
        samples.append(
            TrainSample(
                sample_id=f"g{index // 2}/{index % 2}",
                group_index=index // 2,
                tokens=torch.randint(0, 1 << 31, (prompt + response,), generator=generator, dtype=torch.int32),
                prompt_length=prompt,
                loss_mask=torch.randint(0, 2, (response,), generator=generator).float(),
                advantages=torch.randn(response, generator=generator),
                rollout_logprobs=-torch.rand(response, generator=generator),
            )
        )
    return samples


def test_round_trip_is_exact(tmp_path: Path) -> None:
    samples = make_samples()
    directory = dump_batch(tmp_path / "step_000003", samples, {"train_step": 3, "learning_rate": 1e-6}, HERE)
    loaded = load_batch(directory)
    assert loaded.metadata == {"train_step": 3, "learning_rate": 1e-6}
    assert len(loaded.samples) == len(samples)
    for got, expected in zip(loaded.samples, samples):
        assert (got.sample_id, got.group_index, got.prompt_length) == (
            expected.sample_id,
            expected.group_index,
            expected.prompt_length,
        )
        for name in ("tokens", "loss_mask", "advantages", "rollout_logprobs"):
            assert (
                torch.equal(getattr(got, name), getattr(expected, name))
                and getattr(got, name).dtype == getattr(expected, name).dtype
            )
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_dumping_again_replaces(tmp_path: Path) -> None:
    samples = make_samples()
    dump_batch(tmp_path / "b", samples, {"n": 1}, HERE)
    dump_batch(tmp_path / "b", samples[:1], {"n": 2}, HERE)
    assert load_batch(tmp_path / "b").metadata == {"n": 2} and len(load_batch(tmp_path / "b").samples) == 1


def test_empty_batch(tmp_path: Path) -> None:
    assert load_batch(dump_batch(tmp_path / "b", [], {}, HERE)).samples == ()


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    dump_batch(tmp_path / "b", make_samples(), {}, HERE)
    other = dump_batch(tmp_path / "c", make_samples()[:2], {}, HERE)
    (other / "batch.json").replace(tmp_path / "b" / "batch.json")
    with pytest.raises(ValueError, match="tokens holds 28 values, its lengths add up to 10"):
        load_batch(tmp_path / "b")


def test_no_dump(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no batch.safetensors, batch.json"):
        load_batch(tmp_path)
