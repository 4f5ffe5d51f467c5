"""Weight sync of adapters only, into a stand-in for a server that unpickles and checks them as SGLang does."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dapo.bridge.sources import AdapterSource
from megatron_dapo.bridge.sync_plan import plan_sync
from megatron_dapo.bridge.transports.adapters import AdapterTransport, encode_tensors
from megatron_dapo.bridge.weight_sync import EngineHandles, WeightSync
from megatron_dapo.checkpoints.layouts.lora import LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import megatron_layout
from megatron_dapo.checkpoints.layouts.sglang import sglang_layout
from megatron_dapo.models.config_json import parse_architecture
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.parallel.layout import ParallelLayout
from tests.unit.config import architectures

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
ARCHITECTURE = parse_architecture({**architectures.QWEN_7B, **SIZES, "intermediate_size": 24})
CONFIG = {"peft_type": "LORA", "r": 3}


class AllowedUnpickler(pickle.Unpickler):
    """SGLang's, as far as it matters: 0.5.23 lets these names through, and has its own function in place of the last."""

    NAMES = (("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("torch.storage", "_load_from_bytes"))

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in self.NAMES, f"SGLang would refuse {module}.{name}"
        return super().find_class(module, name)


class Server:
    """Records what happens to it; `damage` is added to the first element that it receives."""

    def __init__(self, damage: float = 0.0) -> None:
        self.calls: list[Any] = []
        self.ranks: list[dict[str, torch.Tensor]] = []
        self._damage = damage

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.calls.append((name, *values))

    def replace_adapter(self, config: Mapping[str, Any], payloads: Sequence[bytes], checksums: Mapping[str, str]) -> None:
        assert config == CONFIG
        self.calls.append("replace_adapter")
        self.ranks = [AllowedUnpickler(io.BytesIO(payload)).load() for payload in payloads]
        next(iter(self.ranks[-1].values())).view(-1)[0] += self._damage
        for tensors in self.ranks:
            for name, tensor in tensors.items():
                found = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
                if found != checksums[name]:
                    raise RuntimeError(f"adapter sync MISMATCH {name}")


def connected(servers: Sequence[Server], dtype: torch.dtype = torch.float32) -> tuple[WeightSync, dict[str, torch.Tensor]]:
    layout = LoraLayout(megatron_layout(ARCHITECTURE, ParallelLayout(1), dtype), 3, ())
    generator = torch.Generator().manual_seed(0)
    adapters = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in layout.local_shapes(0).items()}
    actor = SimpleNamespace(trained_tensors=layout, trained_parameters=lambda: adapters)
    source = AdapterSource(actor, 0, None)
    engines = sglang_layout(ARCHITECTURE, 2, dtype, len(servers))
    plan = plan_sync(*source.layouts(engines), 1 << 20, ranks_per_node=8)
    handles: EngineHandles = EngineHandles([0] * len(servers), dict(enumerate(servers)))
    transport = AdapterTransport(plan, handles, layout, CONFIG, None)
    return WeightSync(plan, handles, transport, Coordination(), weights=source), adapters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_of_every_server_gets_the_adapters_under_pefts_names(dtype: torch.dtype) -> None:
    servers = [Server(), Server()]
    sync, adapters = connected(servers, dtype)
    report = sync.update(4, adapters)
    assert report.is_complete, report.describe()
    stacked = adapters["0.decoder.layers.1.self_attention.linear_qkv.adapter.a"]
    for server in servers:
        assert [call if isinstance(call, str) else call[0] for call in server.calls] == [
            *("pause", "flush_cache", "begin_weight_update", "replace_adapter"),
            *("end_weight_update", "update_weight_version", "resume"),
        ]
        assert len(server.ranks) == 2
        for tensors in server.ranks:
            assert len(tensors) == 2 * 2 * 7
            name = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
            assert torch.equal(tensors[name], stacked[3:6]) and tensors[name].dtype == dtype
    held = 2 * sum(each.numel() for each in adapters.values()) * dtype.itemsize
    assert all(held <= report.engines[engine].num_bytes < 1.25 * held for engine in (0, 1))  # chunks are padded


def test_a_server_that_received_something_else_is_not_served() -> None:
    servers = [Server(), Server(damage=1e-3)]
    sync, adapters = connected(servers)
    report = sync.update(1, adapters)
    assert list(report.failures) == [1] and "MISMATCH" in report.failures[1]
    assert ("resume",) in servers[0].calls and ("resume",) not in servers[1].calls


def test_a_payload_holds_its_values_whatever_replaces_torchs_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = torch.storage._load_from_bytes
    monkeypatch.setattr(torch.storage, "_load_from_bytes", lambda content: None)  # megatron-core 0.19 does this.
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "c": torch.randn(3, 5).T}
    payload = encode_tensors(tensors)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", loader)
    found = AllowedUnpickler(io.BytesIO(payload)).load()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors) and found["a"].dtype == torch.bfloat16
