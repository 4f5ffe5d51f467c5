"""Log-probs of an SGLang server that serves a quantized directory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.engines.sglang.standalone import started
from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.quantization.probe import Sample


def engine_logprobs(
    directory: Path, samples: Sequence[Sample], python: Path, device: str, dtype: str
) -> list[list[float]]:
    """Return [sample][response token] log-probs in nats. Raises RuntimeError, with the first error of the server's log, if
    the server does not serve the directory. The server has exited when this returns."""
    with tempfile.TemporaryDirectory(prefix="quantized-") as scratch:
        settings = ServerSettings(
            python=python,
            model_path=directory,
            key_file=create_key(Path(scratch)),
            log_dir=Path(scratch),
            device=device,  # type: ignore[arg-type]
            dtype=dtype,
            max_running_requests=8,
        )
        with started([settings]) as (server,):
            client = SglangClient(server.url, read_key(server.key_file))
            return [sample.scored(client.prompt_logprobs(sample.token_ids)) for sample in samples]
