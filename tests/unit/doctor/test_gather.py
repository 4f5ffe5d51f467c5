"""Facts gathered from made-up environments, directories and interpreters."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dapo.config import config_from_dict
from megatron_dapo.config.schema import Config
from megatron_dapo.doctor import gather
from megatron_dapo.doctor.gather import ProbeFailure, ask, run
from megatron_dapo.doctor.machine import ApexFacts, TransformerEngineFacts
from megatron_dapo.doctor.recipe import sglang_findings

MODEL = gather.ROOT / "examples" / "quickstart" / "base_model"


def config(**sections: dict) -> Config:
    return config_from_dict({"model": {"path": str(MODEL)}, "data": {"train_paths": ["train.jsonl"]}, **sections})


def put(directory: Path, *files: str) -> None:
    for file in files:
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n", encoding="utf-8")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that comes first where modules are looked for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def test_the_two_kinds_of_apex_are_told_apart_without_importing_either(packages: Path) -> None:
    put(packages, "apex/__init__.py", "apex/lib/libapex.py")
    assert gather.apex_facts({"apex": "0.9.10"}) == ApexFacts(True, False, False, "0.9.10")
    put(packages, "apex/optimizers/__init__.py")
    assert gather.apex_facts({}) == ApexFacts(True, True, False, None)
    put(packages, "amp_C.py")
    importlib.invalidate_caches()
    assert gather.apex_facts({}) == ApexFacts(True, True, True, None)


def test_a_transformer_engine_that_cannot_be_imported_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather.transformer_engine_facts({}) == TransformerEngineFacts()
    put(packages, "transformer_engine/__init__.py")
    importlib.invalidate_caches()
    monkeypatch.setenv("PYTHONPATH", str(packages))
    facts = gather.transformer_engine_facts({"transformer-engine": "2.20.2"})
    assert facts == TransformerEngineFacts("2.20.2", error="RuntimeError: imported")


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
    ],
)
def test_driver_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text, encoding="utf-8")
    monkeypatch.setattr(gather, "_DRIVER_FILE", tmp_path / "version")
    assert gather._driver() == version


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(gather, "DRIVER_DEVICE", tmp_path / "nvidiactl")
    assert gather._driver() is None


def test_a_probe_that_fails_says_why() -> None:
    with pytest.raises(ProbeFailure, match="nonsense"):
        ask("attention", nonsense=1)
    with pytest.raises(ProbeFailure, match="crashed \\(SIGABRT\\)"):
        run([sys.executable, "-c", "import os; os.abort()"], {}, 60)
    with pytest.raises(ProbeFailure, match="within 0.2 s"):
        run([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.2)
    with pytest.raises(ProbeFailure, match="No such file"):
        run(["/nowhere/python"], {}, 60)
    with pytest.raises(ProbeFailure, match="exit code 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"], {}, 60)


def test_facts_of_the_servers_environment_come_from_its_own_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho \'["0.5.19", ["/r", 1, 2], {}]\'\n', encoding="utf-8")
    script.chmod(0o755)
    facts = gather.sglang_facts(config(sglang={"python": str(script)}))
    assert (facts.error, facts.version, facts.record) == ("", "0.5.19", ("/r", 1, 2))
    script.write_text("#!/bin/sh\necho broken >&2; exit 1\n", encoding="utf-8")
    assert gather.sglang_facts(config(sglang={"python": str(script)})).error == "broken"
    assert gather.sglang_facts(config(sglang={"python": str(tmp_path / "no")})).error == "no such file"


def test_a_script_that_gives_servers_other_settings_of_nccl(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexport NCCL_CUMEM_ENABLE=1\nexec {sys.executable} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    p2p = {"placement": "disaggregated", "weight_sync_transport": "p2p"}
    facts = gather.sglang_facts(config(sglang={"python": str(script), **p2p}))
    assert facts.nccl_difference == f"NCCL_CUMEM_ENABLE is 0 in the trainer and 1 for {script}"
    [refusal] = [each for each in sglang_findings(replace(facts, version="0.5.17")) if each.name == "sglang nccl"]
    assert refusal.verdict == "conflict" and facts.nccl_difference in refusal.detail
    assert gather.sglang_facts(config(sglang={"python": sys.executable, **p2p})).nccl_difference == ""
    assert gather.sglang_facts(config(sglang={"python": str(script)})).nccl_difference == ""  # no communicator


def test_an_interpreter_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gather.sglang_facts(config(sglang={"python": sys.executable}))
    assert facts.error == "" and facts.version == gather.installed_versions().get("sglang")


def test_attention_shape_is_that_of_a_tensor_rank() -> None:
    head_dim, heads, groups = gather.attention_shape(config())
    assert gather.attention_shape(config(parallel={"tp_size": 2})) == (head_dim, heads // 2, groups // 2)
