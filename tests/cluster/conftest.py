"""Virtual clusters with real Slurm, each removed after its tests, also after a failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for path in (ROOT, Path(__file__).parent):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

from jobs import REQUIRED  # noqa: E402

from tools.fault_injection.faults import small_disk  # noqa: E402
from tools.virtual_cluster import ClusterSettings, VirtualCluster, unavailable, virtual_cluster  # noqa: E402

WORK = "MEGATRON_DAPO_CLUSTER_WORK"  # the cluster's directory, which `make` cleans up if this process is killed


@contextmanager
def _cluster(factory: pytest.TempPathFactory, settings: ClusterSettings) -> Iterator[VirtualCluster]:
    reason = unavailable()
    if reason and not os.environ.get(REQUIRED):
        pytest.skip(f"no virtual cluster on this machine: {reason}; see `make test-cluster`")
    work = Path(os.environ[WORK]) if WORK in os.environ else factory.mktemp("cluster")
    with virtual_cluster(work, settings) as cluster:
        yield cluster


# One cluster at a time: each belongs to the tests of one file.


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualCluster]:
    """Two idle nodes."""
    with _cluster(tmp_path_factory, ClusterSettings(kill_wait_s=5)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def small_shared_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that can be filled and frozen; nodes that boot later see it."""
    directory = tmp_path_factory.mktemp("disk")
    with small_disk(directory / "image", directory / "mount") as disk:
        yield disk


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory: pytest.TempPathFactory, small_shared_disk: Path) -> Iterator[VirtualCluster]:
    """Four idle nodes that see the small disk."""
    with _cluster(tmp_path_factory, ClusterSettings(num_nodes=4, kill_wait_s=5)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def five_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualCluster]:
    """Five idle nodes: four for a run and a spare one."""
    with _cluster(tmp_path_factory, ClusterSettings(num_nodes=5, kill_wait_s=15)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory, two_nodes: VirtualCluster) -> Iterator[VirtualCluster]:
    """A cluster with a spare node for jobs of two. `two_nodes` says whether this machine can have one; it stays idle."""
    with virtual_cluster(tmp_path_factory.mktemp("three"), ClusterSettings(num_nodes=3, kill_wait_s=5)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def job_environment() -> dict[str, str]:
    """Environment of a user who submits jobs: the trainer's interpreter first on the path."""
    keep = {key: os.environ[key] for key in ("HOME", "LANG", "PYTHONPATH") if key in os.environ}
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**keep, "PATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PREFLIGHT": "0"}


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Interpreter of the engines' environment."""
    python = Path(os.environ.get("MEGATRON_DAPO_ENGINE_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    if not python.exists() and not os.environ.get(REQUIRED):
        pytest.skip(f"{python} does not exist: make .venv-sglang")
    return python
