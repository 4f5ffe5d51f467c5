"""Virtual clusters with real Slurm, each removed after its tests, also after a failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.virtual_cluster import ClusterSettings, VirtualCluster, unavailable, virtual_cluster  # noqa: E402

REQUIRED = "MEGATRON_DAPO_CLUSTER"  # set by `make test-cluster`: a machine that cannot run these tests is then an error
WORK = "MEGATRON_DAPO_CLUSTER_WORK"  # the cluster's directory, which `make` cleans up if this process is killed


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualCluster]:
    """Two idle nodes."""
    reason = unavailable()
    if reason and not os.environ.get(REQUIRED):
        pytest.skip(f"no virtual cluster on this machine: {reason}; see `make test-cluster`")
    work = Path(os.environ[WORK]) if WORK in os.environ else tmp_path_factory.mktemp("cluster")
    with virtual_cluster(work, ClusterSettings(kill_wait_s=5)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def job_environment() -> dict[str, str]:
    """Environment of a user who submits jobs: the trainer's interpreter first on the path."""
    keep = {key: os.environ[key] for key in ("HOME", "LANG", "PYTHONPATH") if key in os.environ}
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**keep, "PATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Interpreter of the engines' environment."""
    python = Path(os.environ.get("MEGATRON_DAPO_ENGINE_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    if not python.exists() and not os.environ.get(REQUIRED):
        pytest.skip(f"{python} does not exist: make .venv-sglang")
    return python
