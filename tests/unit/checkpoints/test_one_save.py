"""The path of one save: a traced save of a rank and its file process against the list in docs/architecture.md."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.checkpoints.save import BackgroundSaves
from megatron_dapo.checkpoints.store import CheckpointStore, CheckpointWriter, newest_valid
from megatron_dapo.files.process import FileProcess
from tests.architecture_page import listed_files
from tests.unit.checkpoints.file_trace import FileTrace

TRACER = Path(__file__).with_name("file_trace.py")
SECTION = "One save, from a rank's tensors to the disk"


@pytest.mark.skipif(not FileProcess.IS_POSSIBLE, reason="needs Linux's memfd")
def test_a_save_passes_the_documented_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def start_traced(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        module = command.index("-m")
        traced = [*command[:module], str(TRACER), str(tmp_path / "traced.json"), *command[module + 1 :]]
        return start(traced, **options)

    monkeypatch.setattr(subprocess, "Popen", start_traced)
    files = FileProcess()
    monkeypatch.undo()
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, files=files)
    saves, weight = BackgroundSaves(store), torch.arange(64.0)

    def write(writer: CheckpointWriter) -> None:
        writer.save_tensors("policy_00000.safetensors", {"weight": weight})
        writer.save_json("run.json", {"step": 1})

    trace = FileTrace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        saves.start(1, write)
        saves.wait_for_copy()
        saves.finish()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        files.close()
    checkpoint = newest_valid(CheckpointStore(tmp_path / "checkpoints", keep=1))
    assert checkpoint is not None and torch.equal(checkpoint.load_tensors("policy_00000.safetensors")["weight"], weight)
    of_file_process = json.loads((tmp_path / "traced.json").read_text(encoding="utf-8"))
    assert of_file_process, "the file process was not traced"
    assert sorted({*trace.files, *of_file_process}) == sorted(listed_files(SECTION))


def test_the_path_is_short() -> None:
    files = listed_files(SECTION)
    assert len(files) == len(set(files)) <= 8
    assert len({file.split("/")[0] for file in files if "/" in file}) <= 2
