"""NVIDIA apex by a stand-in with its signatures: if it is installed and Transformer Engine is not, and if it is requested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_checks import write_reference

HERE = Path(__file__).parent


def trained(mode: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(HERE / "apex_checks.py"), mode, str(directory / f"{mode}.pt")]
    path = os.pathsep.join(filter(None, (str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_steps_with_apex_are_those_with_torch(tmp_path: Path) -> None:
    write_reference(tmp_path, "qwen2")
    right = trained("torch", tmp_path)
    assert right["rows"]["optimizer"].startswith("torch") and right["calls"] == []
    weights = torch.load(tmp_path / "torch.pt")
    for mode in ("installed", "requested"):
        found = trained(mode, tmp_path)
        assert found["rows"]["optimizer"] == "NVIDIA apex FusedAdam", mode
        assert found["rows"]["gradient norm"] == "NVIDIA apex multi_tensor_l2norm", mode
        # Also the weights after the step: a count of steps that is lost changes only the bias correction.
        assert found["resumed"] == found["history"][-1] and found["differing"] == [], mode
        for step, expected in zip(found["history"], right["history"], strict=True):
            assert step == pytest.approx(expected, rel=1e-5), mode
        ours = torch.load(tmp_path / f"{mode}.pt")
        assert set(ours) == set(weights)
        for name, tensor in weights.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)
        kernels, *products = found["calls"]
        assert min(kernels.values()) > 0 and (mode == "requested" or products[0] > 0), found["calls"]


def test_apex_that_is_not_there_is_refused() -> None:
    from megatron_dapo.megatron.apex import use_apex

    with pytest.raises(ValueError, match='optimizer.implementation = "apex": No module named'):
        use_apex()
