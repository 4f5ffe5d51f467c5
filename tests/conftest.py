"""Conditions of every test: one thread a process, no network, files in one piece, and the gpu marker skips with its
reason."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: tests run at the same time, and tiny matrices lose by being split.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from megatron_dapo.imports import heavy_imports
from megatron_dapo.launch.environment import leave_compiler_out

leave_compiler_out()

# Files of tests/distributed whose ranks stand by for the next one (distributed/launcher.py).
RANKS = (
    *("collectives", "connected_groups", "coordination", "embedded_lockstep", "fp8_layers", "gated_delta", "head_implementations"),
    *("launcher", "logprob_tensor_parallel", "lora", "memory", "one_sample", "one_shard", "reshard", "sample_share", "sft", "weight_sync"),
)
# Files that share ranks, a run or servers, which are slow to make: the longest units of work, so they start first.
TOGETHER = {
    **{f"distributed/test_{name}": "ranks" for name in RANKS},
    "families/test_made_up": "ranks",
    "e2e/test_streamed_steps": "ranks",
    "e2e/test_few_responses": "ranks",
    "e2e/test_not_finite": "ranks",
    "e2e/test_value_layouts": "ranks",
    "e2e/test_value_own_ranks": "ranks",
    "e2e/test_finished_run": "finished run",
    "e2e/test_interrupted_runs": "finished run",
    "e2e/test_ends_of_runs": "finished run",
    "e2e/test_offload": "finished vapo run",
    "e2e/test_value_path": "finished vapo run",
    "engine/test_weight_sync": "filled servers",
    "engine/test_p2p_weight_sync": "filled servers",
    "engine/test_generation": "seeded servers",
    "engine/test_routing": "seeded servers",
    "engine/test_server": "seeded servers",
}


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run with another megatron-core than the one that `make test-megatron` names; its ranks do the same."""
    wanted, found = os.environ.get("MEGATRON_DAPO_MEGATRON_CORE"), version("megatron-core")
    if wanted not in (None, found):
        raise pytest.UsageError(f"the tests are for megatron-core {wanted}, and {found} is first on the path")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Any:
    """Import all that tests import."""
    with heavy_imports():
        return (yield)


@pytest.hookimpl(optionalhook=True)  # a hook of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`: one process runs all tests of a file, and of the files that belong together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TogetherScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _shared(file) or file

        def remove_node(self, node: Any) -> str | None:
            """A test that ends its process has failed and does not run again; the rest of its file runs in another."""
            units = self.assigned_work[node].values()
            ended = next(((unit, test) for unit in units for test, is_over in unit.items() if not is_over), None)
            if ended is None:
                return super().remove_node(node)
            unit, test = ended
            unit[test] = True
            super().remove_node(node)
            return test

    return TogetherScheduling(config, log)


def _shared(file: str) -> str | None:
    """Return what a file shares with others."""
    directory, name = Path(file).with_suffix("").parts[-2:]
    return TOGETHER.get(f"{directory}/{name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _shared(str(item.path)) is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch sees none"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parents[1]
