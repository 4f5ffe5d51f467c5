"""Packaging: dependencies of an install, locks that satisfy them, and programs that start."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import megatron_dapo
from megatron_dapo.config.loader import read_toml

COMPILED = (
    "transformer-engine",
    "flash-attn",
    "apex",
    "sglang",
    "flashinfer",
    "triton",
    "nvidia",
    "vllm",
    "modelopt",
    "cuda",
)


@pytest.fixture(scope="module")
def metadata(repository: Path) -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    return read_toml(repository / "pyproject.toml")["project"]


def pins(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for requirement in requirements:
        assert re.fullmatch(r"==[0-9][0-9A-Za-z.+]*", str(requirement.specifier)), (
            f"{path.name}: {requirement} is not an exact pin"
        )
    return {canonicalize_name(requirement.name): str(requirement.specifier)[2:] for requirement in requirements}


def test_megatron_core_of_the_cuda_lock_is_tested(repository: Path) -> None:
    locks = [pins(repository / "requirements" / name) for name in ("megatron-cpu-py311.txt", "cuda-py312.txt")]
    tested, shipped = (lock["megatron-core"] for lock in locks)
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    assert tested == shipped and f"MEGATRON_CORE ?= {tested}\n" in makefile


def test_metadata(metadata: dict[str, Any]) -> None:
    assert metadata["name"] == "megatron-dapo" and metadata["dynamic"] == ["version"]
    assert set(metadata["optional-dependencies"]) >= {"gpu", "sglang", "quantize", "plots", "dev"}
    assert metadata["license"] == "Apache-2.0" and metadata["readme"] == "README.md" and metadata["classifiers"]


def test_base_install_pulls_no_compiled_cuda_package(metadata: dict[str, Any]) -> None:
    names = [canonicalize_name(Requirement(line).name) for line in metadata["dependencies"]]
    assert "torch" in names and not [name for name in names if name.startswith(COMPILED)]


@pytest.mark.parametrize(
    ("lock", "python", "extras"), [("cpu-py311.txt", "3.11", ["dev"]), ("cuda-py312.txt", "3.12", ["gpu", "dev"])]
)
def test_lock_satisfies_the_requirements(
    repository: Path, metadata: dict[str, Any], lock: str, python: str, extras: list[str]
) -> None:
    pinned = pins(repository / "requirements" / lock)
    wanted = metadata["dependencies"] + [line for extra in extras for line in metadata["optional-dependencies"][extra]]
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{lock} does not pin {requirement.name}"
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{lock}: {requirement.name} {version} is not {requirement.specifier}"
        )


def test_engines_on_gpus_have_the_trainers_torch(repository: Path, metadata: dict[str, Any]) -> None:
    """Ranks of both join one NCCL communicator, and tensors pass from one to the other by CUDA IPC."""
    trainer, engines = (pins(repository / "requirements" / f"{name}cuda-py312.txt") for name in ("", "sglang-"))
    for name in ("torch", "triton", "nvidia-nccl-cu13", "transformers", "safetensors"):
        assert trainer[name] == engines[name], name
    (wanted,) = map(Requirement, metadata["optional-dependencies"]["sglang"])
    assert wanted.specifier.contains(engines["sglang"])
    cpu = (repository / "requirements/sglang-cpu-py311.txt").read_text(encoding="utf-8")
    assert f"sglang=={engines['sglang']}\n" in cpu, "the CPU tests run another SGLang than GPUs get"


def test_the_oldest_lock_has_the_lower_bounds(repository: Path, metadata: dict[str, Any]) -> None:
    """All but torch, of whose oldest version there is no CPU build in the index."""
    pinned = pins(repository / "requirements/cpu-py311-oldest.txt")
    for requirement in map(Requirement, metadata["dependencies"] + metadata["optional-dependencies"]["dev"]):
        if requirement.name == "torch" or (
            requirement.marker and not requirement.marker.evaluate({"python_version": "3.11"})
        ):
            continue
        (lowest,) = (one.version for one in requirement.specifier if one.operator == ">=")
        found = pinned[canonicalize_name(requirement.name)]
        assert Version(found).release[: len(Version(lowest).release)] == Version(lowest).release, (requirement, found)


def test_cpu_lock_has_no_cuda_package(repository: Path) -> None:
    assert not [name for name in pins(repository / "requirements" / "cpu-py311.txt") if name.startswith(COMPILED)]


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or sys.platform != "linux", reason="the tested CPU lock is for Python 3.11 on Linux"
)
def test_installed_is_what_the_lock_says(repository: Path) -> None:
    wrong = {}
    for name, version in pins(repository / "requirements" / "cpu-py311.txt").items():
        installed = importlib.metadata.version(name).partition("+")[0]
        if installed != version:
            wrong[name] = (installed, version)
    assert not wrong, f"(installed, locked): {wrong}; run `make clean .venv`"


def test_console_script_points_to_the_app(metadata: dict[str, Any]) -> None:
    assert metadata["scripts"] == {"megatron-dapo": "megatron_dapo.cli.main:app"}
    from megatron_dapo.cli.main import app

    assert callable(app)


def test_versions_are_never_compared_as_text() -> None:
    for path in Path(megatron_dapo.__file__).parent.rglob("*.py"):
        assert not re.search(r"__version__\s*(<|>|==|!=)", path.read_text(encoding="utf-8")), path


def test_shell_scripts_parse_and_name_what_exists(repository: Path) -> None:
    scripts = [*sorted((repository / "examples" / "launch").glob("*.sh")), repository / ".ci" / "run"]
    assert len(scripts) >= 3
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert script.stat().st_mode & 0o100, f"{script.name} is not executable"
        assert "set -euo pipefail" in text and "pkill" not in text
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
        for recipe in re.findall(r"examples/[\w./-]+\.toml", text):
            assert (repository / recipe).is_file(), f"{script.name} names {recipe}"
        for module in re.findall(r"megatron_dapo(?:\.\w+)+", text):
            assert (repository / (module.replace(".", "/") + ".py")).is_file(), f"{script.name} names {module}"


def test_container_files_run_the_makefiles_steps(repository: Path) -> None:
    container = repository / "examples" / "container"
    docker, apptainer = ((container / name).read_text(encoding="utf-8") for name in ("Dockerfile", "megatron_dapo.def"))
    (base,) = re.findall(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    assert f"From: {base}\n" in apptainer
    packages = [set(re.findall(r"^ +(build-essential .*?)( \\)?$", text, re.MULTILINE)) for text in (docker, apptainer)]
    assert {names for names, _ in packages[0]} == {names for names, _ in packages[1]}
    for text in (docker, apptainer):
        for recipe in re.findall(r"examples/[\w./-]+", text):
            assert (repository / recipe).exists(), recipe
        for target in re.findall(r"\bmake (\S+) DEVICE", text):
            command = ["make", "--no-print-directory", "--always-make", "-n", target, "DEVICE=cuda"]
            done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=30, check=True)
            assert "cuda-py312.txt" in done.stdout, done.stdout
    for sources in re.findall(r"^COPY (.*) \S+$", docker, re.MULTILINE):
        assert all((repository / name).exists() for name in sources.split()), sources


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("flags", "expected"), [([], "quickstart.toml"), (["LAYOUT=tp1pp2"], "quickstart.toml --layout tp1pp2")]
)
def test_make_quickstart_runs_the_train_command(repository: Path, flags: list[str], expected: str) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "quickstart", *flags],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1].rstrip().endswith(f"megatron-dapo train examples/quickstart/{expected}")
