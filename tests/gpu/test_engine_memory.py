"""An SGLang server that shares the GPU: it releases its memory and serves again after it wakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("real_gpu")]

SLACK_BYTES = 64 << 20
MEMORY_FRACTION = 0.2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tools import make_smoke_model

    make_smoke_model.write(tmp_path / "model", "small")
    return tmp_path / "model"


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_memory_is_released_measured_and_taken_back(device, model, engine_python, tmp_path) -> None:
    from megatron_dapo.engines.sglang.client import ColocatedClient
    from megatron_dapo.engines.sglang.cluster import SharedDevice
    from megatron_dapo.engines.sglang.keys import create_key, read_key
    from megatron_dapo.engines.sglang.server import SglangServer
    from megatron_dapo.engines.sglang.server_settings import ServerSettings

    total = torch.cuda.mem_get_info()[1]
    settings = ServerSettings(
        python=engine_python,
        model_path=model,
        key_file=create_key(tmp_path),
        log_dir=tmp_path,
        device="cuda",
        dtype="bfloat16",
        prefill_cuda_graph=False,
        memory_fraction=MEMORY_FRACTION,
        memory_saver=True,
        start_timeout_s=280.0,
    )
    server = SglangServer.start(settings)
    try:
        info = server.wait_until_healthy()
        client = ColocatedClient(server.url, read_key(server.key_file), api_version=info.api_version)
        tokens = list(range(5, 25))
        before = client.prompt_logprobs(tokens)
        serving = free_bytes()
        client.sleep()
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        shared = SharedDevice(weights, timeout_s=30.0)
        freed = shared.wait_for_memory(serving)
        # The fraction counts weights and cache; graphs and workspaces stay.
        assert freed > 0.5 * MEMORY_FRACTION * total, f"{freed / 1e9:.2f} GB of {MEMORY_FRACTION * total / 1e9:.2f}"
        # What a trainer has used and its allocator keeps is in the way of a server that wakes, until it is released.
        size = int(0.5 * MEMORY_FRACTION * total)
        torch.empty(size, dtype=torch.uint8, device=device)
        kept = free_bytes()
        shared.make_room_for_cache()
        assert free_bytes() - kept > size - SLACK_BYTES
        client.begin_weight_update()
        client.update_weights_from_disk(str(model))
        client.end_weight_update()
        client.resume()
        assert abs(free_bytes() - serving) < SLACK_BYTES
        assert client.prompt_logprobs(tokens) == pytest.approx(before, abs=1e-3)
    finally:
        server.stop()
