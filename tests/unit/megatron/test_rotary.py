from __future__ import annotations

import pytest
import torch

from megatron_dapo.megatron.rotary import inverse_frequencies
from megatron_dapo.models.blocks import RopeScaling

PARAMETERS = [
    None,
    RopeScaling("linear", 4.0),
    RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),  # Llama 3.1
    RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),  # Llama 3.2
    RopeScaling("llama3", 4.0, 1.5, 6.0, 64),
]


@pytest.mark.parametrize("scaling", PARAMETERS)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 500000.0), (24, 10000.0)])
def test_frequencies_are_those_of_transformers(scaling: RopeScaling | None, head_dim: int, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    config = LlamaConfig(hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, rope_parameters=rope)
    torch.testing.assert_close(
        inverse_frequencies(head_dim, theta, scaling), LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0
    )
