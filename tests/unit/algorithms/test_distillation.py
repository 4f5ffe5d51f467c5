"""Which advantages a sample keeps under teachers, and what a server's log-probs add."""

from __future__ import annotations

import torch

from megatron_dapo.algorithms.distillation import with_teachers
from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.types import TrainSample

SECTION = DistillationConfig.model_validate(
    {
        "coefficient": 0.5,
        "teachers": (
            {"name": "model", "sources": ("a", "b")},
            {"name": "server", "url": "http://host:1", "sources": ("b", "c"), "rl": True},
        ),
    }
)


def sample(source: str, gains: torch.Tensor | None = None) -> TrainSample:
    ones = torch.ones(3)
    return TrainSample("0/0", 0, torch.arange(5), 2, ones, 2 * ones, -ones, source=source, teacher_gains=gains)


def advantages(source: str, gains: torch.Tensor | None = None) -> list[float]:
    return with_teachers([sample(source, gains)], SECTION)[0].advantages.tolist()


def test_rewards_count_unless_only_teachers_without_them_teach() -> None:
    assert advantages("a") == [0, 0, 0]
    assert advantages("b") == advantages("c") == advantages("other") == [2, 2, 2]
    assert SECTION.teachers_of("b") == SECTION.teachers and not SECTION.teachers_of("other")


def test_a_server_gives_each_token_its_advantage() -> None:
    gains = torch.tensor([-1.0, 0.0, 4.0])
    assert advantages("c", gains) == [1.5, 2.0, 4.0]
    assert advantages("a", gains) == [-0.5, 0.0, 2.0]


def test_samples_of_other_ranks_need_no_numbers() -> None:
    assert advantages("c", torch.empty(3, device="meta")) == [2, 2, 2]


def test_a_teacher_without_sources_teaches_all() -> None:
    everything = DistillationConfig.model_validate({"teachers": ({"name": "one"},)})
    assert with_teachers([sample("anything")], everything)[0].advantages.tolist() == [0, 0, 0]
    [alone] = with_teachers([sample("anything")], DistillationConfig())
    assert alone.advantages.tolist() == [2, 2, 2]
