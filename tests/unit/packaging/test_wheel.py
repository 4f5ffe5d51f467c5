"""The wheel: what is in it, and that its command works outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

SOURCES = (
    "megatron_dapo",
    "examples",
    "requirements",
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)
LOCK = "requirements/cpu-py311.txt"


def pip(*arguments: object, python: str | Path = sys.executable, timeout: float = 300) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"pip {arguments}: {done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, for a build leaves files next to its sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (repository / name).is_dir():
            shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        else:
            shutil.copy(repository / name, source / name)
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


# Commands in one process, which imports the package once; then the locks that the installed package reads.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from megatron_dapo.cli.main import app
from megatron_dapo.doctor.gather import locks
results = [CliRunner().invoke(app, arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.output] for result in results] + [[lock.name for lock in locks()]]))
"""


def run_commands(installed: Path, directory: Path, *commands: str) -> list[Any]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMMANDS, json.dumps([one.split() for one in commands])]
    done = subprocess.run(
        command, check=False, cwd=directory, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_contents(wheel: Path, repository: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"megatron_dapo"}
    for directory in ("recipes", "layouts", "launch", "grids", "references", "quickstart"):
        tracked = {p.relative_to(repository).as_posix() for p in (repository / "examples" / directory).rglob("*.*")}
        assert tracked and {f"megatron_dapo/{name}" for name in tracked if "/runs/" not in name} <= set(names)
    assert f"megatron_dapo/{LOCK}" in names and "megatron_dapo/nodes/reference.json" in names
    assert not [name for name in names if name.endswith(".pyc") or "/runs/" in name]


def test_metadata_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        directory = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        metadata = archive.read(f"{directory}/METADATA").decode()
        scripts = archive.read(f"{directory}/entry_points.txt").decode()
        assert archive.getinfo(f"{directory}/licenses/LICENSE").file_size > 10_000
    for line in ("License-Expression: Apache-2.0", "Requires-Python: <3.13,>=3.10", "Provides-Extra: sglang"):
        assert line in metadata
    assert "Requires-Dist: megatron-core<0.20,>=0.16.1" in metadata
    assert "megatron-dapo = megatron_dapo.cli.main:app" in scripts


def test_it_works_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    commands = ("recipes list --json", "recipes copy colocated_1node", "recipes copy launch", "quickstart --dry-run")
    *results, locks = run_commands(installed, tmp_path, *commands)
    assert [code for code, _ in results] == [0] * len(commands), results
    listed = json.loads(results[0][1])
    assert {"quickstart/quickstart", "layouts/colocated_1node", "launch/slurm", "grids/short"} <= set(listed)
    copied = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.toml")}
    recipes = {f"examples/recipes/dapo_qwen2.5_{size}.toml" for size in ("7b", "32b")}  # each is the `base` of the next
    assert copied == {"examples/layouts/colocated_1node.toml", *recipes}
    assert os.access(tmp_path / "examples/launch/slurm.sh", os.X_OK)
    plan = results[3][1]
    assert (str(tmp_path) in plan or "train step" in plan) and not (tmp_path / "runs").exists()
    assert Path(LOCK).name in locks


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the tested CPU lock is for Python 3.11")
def test_the_quickstart_trains_in_a_new_environment(wheel: Path, repository: Path, tmp_path: Path) -> None:
    """As a user would: a new environment, the lock, the wheel, one command in an empty directory."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv/bin/python"
    torch = next(line for line in (repository / LOCK).read_text().splitlines() if line.startswith("torch=="))
    index = "https://download.pytorch.org/whl/cpu"
    pip(
        "install", "--quiet", "--no-deps", "--retries", 1, torch, "--extra-index-url", index, python=python, timeout=600
    )
    pip("install", "--quiet", "-r", repository / LOCK, python=python, timeout=900)
    pip("install", "--quiet", "--no-deps", wheel, python=python)
    (tmp_path / "work").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [tmp_path / "venv/bin/megatron-dapo", "quickstart"]
    done = subprocess.run(
        command, check=False, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "work/runs/quickstart/summary.json").read_text())
    assert summary["accuracy_after"] > 0.7 > summary["accuracy_before"]
    assert (tmp_path / "work/runs/quickstart/huggingface/config.json").is_file()
