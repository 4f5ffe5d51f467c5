"""The engine check of quantized directories: its log-probs are right for a directory that every engine serves."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dapo.doctor.engine_import import engine_libraries
from megatron_dapo.engines.sglang.server import EngineStartError
from megatron_dapo.quantization.engine_check import engine_logprobs
from megatron_dapo.quantization.probe import Sample, compare, logprobs_of


@pytest.mark.long
def test_log_probs_of_a_served_directory_are_transformers(tiny_model, engine_python) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [Sample(torch.randint(3, 300, (20 + 5 * n,), generator=generator).tolist(), 6) for n in range(3)]
    served = engine_logprobs(tiny_model, samples, engine_python, "cpu", "float32")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert compare([logprobs_of(model, sample) for sample in samples], served).max_abs < 1e-4


@pytest.mark.long
def test_an_unservable_directory_raises_the_engines_error(tmp_path, tiny_model, engine_python) -> None:
    (tmp_path / "config.json").write_text(
        (tiny_model / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 60')
    )
    with pytest.raises(EngineStartError, match="engine 0"):
        engine_logprobs(tmp_path, [Sample([1, 2, 3], 1)], engine_python, "cpu", "float32")


def test_the_dry_run_s_import_succeeds_where_a_server_starts(engine_python, tmp_path, monkeypatch) -> None:
    """On a CPU too, where a bare `import sglang` fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    libraries = engine_libraries(engine_python, ("record",))
    assert not libraries.error and not libraries.failures, libraries
