"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over packed sequences, without Transformer Engine.

Queries, and keys and values together, are compressed to a latent vector, normed and expanded to heads. The rotary part of
a key is computed from the hidden states, and all heads share it. Keys and values are expanded before they are
attended to: absorbing the expansion into queries and outputs, as engines do, saves memory only while decoding.

Parameters have the names of megatron-core's `MLASelfAttention`, which is used with Transformer Engine and cannot be built without
it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_dapo.megatron.attention import PackedSequences, _Rotate
from megatron_dapo.megatron.layers import fp8_product
from megatron_dapo.megatron.rotary import inverse_frequencies, yarn_scale
from megatron_dapo.models.blocks import Yarn


class DuplicatedLinear(torch.nn.Module):
    """A linear layer without bias, whole on every tensor rank, each of which maps its tokens."""

    def __init__(self, input_size: int, output_size: int, *, config: MLATransformerConfig) -> None:
        super().__init__()
        settings = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **settings))
        # megatron-core sums the gradients of marked parameters over tensor ranks: each rank has only seen its tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [..., input_size] to [..., output_size], and return the bias (None)."""
        return F.linear(hidden, self.weight), None


class Fp8DuplicatedLinear(DuplicatedLinear):
    """The same by an emulated FP8 product."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [tokens, 1, input_size], and return the bias (None)."""
        return fp8_product(hidden, self.weight), None


class PackedLatentAttention(Attention):
    """Latent attention whose query is compressed unless `q_lora_rank` is None. `LatentGPTConfig` gives megatron-core's base
    class the scale of the products and the size of a head's output.

    Under tensor parallelism it needs sequence parallelism, as experts do: `transformer_config` checks. The compressed vectors
    are then computed from each rank's tokens, and the expansions gather them.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        **settings: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attention_type="self", **settings)
        # Not a buffer: a model in bf16 would round it.
        frequencies, self._factor = rotary_frequencies(config)
        self._frequencies = frequencies.to(torch.cuda.current_device())
        query_size = config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        key_value_size = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        if config.q_lora_rank is None:
            self.linear_q_proj = self._expansion(submodules.linear_q_proj, config.hidden_size, query_size)
        else:
            self.linear_q_down_proj = submodules.linear_q_down_proj(
                config.hidden_size, config.q_lora_rank, config=config
            )
            self.linear_q_up_proj = self._expansion(submodules.linear_q_up_proj, config.q_lora_rank, query_size)
        compressed_size = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = submodules.linear_kv_down_proj(config.hidden_size, compressed_size, config=config)
        self.linear_kv_up_proj = self._expansion(submodules.linear_kv_up_proj, config.kv_lora_rank, key_value_size)

    def _expansion(self, linear: Any, input_size: int, output_size: int) -> torch.nn.Module:
        module: torch.nn.Module = linear(
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.pg_collection.tp,
        )
        return module

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, packed: PackedSequences
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map [P or its sequence-parallel slice, 1, h] to query and key [P, heads, head_dim] and value [P, heads,
        v_head_dim] of this rank's heads."""
        config, heads = self.config, (self.num_attention_heads_per_partition, -1)
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.linear_q_down_proj(hidden_states)[0])
        compressed, _ = self.linear_kv_down_proj(hidden_states)
        latent, key_position = compressed.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        if config.sequence_parallel:
            # Each tensor rank returns the gradient of its heads.
            key_position = gather_from_sequence_parallel_region(
                key_position, tensor_parallel_output_grad=True, group=self.tp_group
            )
        key_value, _ = self.linear_kv_up_proj(latent)
        query, key_value = (part.squeeze(1).unflatten(-1, heads) for part in (query, key_value))
        content, position = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key_content, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        cos, sin = self._rotary_tables(packed, query.dtype)
        position, key_position = (_Rotate.apply(_halves(part), cos, sin) for part in (position, key_position))
        key_position = key_position.expand(-1, key_content.size(1), -1)
        return torch.cat((content, position), dim=-1), torch.cat((key_content, key_position), dim=-1), value

    def _rotary_tables(self, packed: PackedSequences, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(packed.max_seqlen_q, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(positions, self._frequencies).repeat(1, 2)[:, None, None]
        return packed.rotary_tables(angles, dtype, factor=self._factor)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden_states [P or its sequence-parallel slice, 1, h] to the same shape, and a bias (None)."""
        assert packed_seq_params is not None, "latent attention needs packed sequences"
        query, key, value = self.get_query_key_value_tensors(hidden_states, packed_seq_params)
        # Flash attention needs heads of one size. The zeros add nothing, and their outputs are cut off.
        value = F.pad(value, (0, key.size(-1) - value.size(-1)))
        if self.checkpoint_core_attention and self.training:
            context = self._checkpointed_attention_forward(query, key, value, None, packed_seq_params=packed_seq_params)
        else:
            context = self.core_attention(query, key, value, packed_seq_params=packed_seq_params)
        context = context.unflatten(1, (query.size(1), -1))[..., : self.config.v_head_dim].flatten(1)
        return self.linear_proj(context.unsqueeze(1))


def rotary_frequencies(config: MLATransformerConfig) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies [rotary dims / 2], fp32, and the factor of cos and sin."""
    if config.rope_type == "rope":
        return inverse_frequencies(config.qk_pos_emb_head_dim, config.rotary_base, None), 1.0
    yarn = Yarn(
        *(config.rotary_scaling_factor, config.original_max_position_embeddings, config.beta_fast, config.beta_slow),
        *(config.mscale, config.mscale_all_dim),
    )
    return inverse_frequencies(config.qk_pos_emb_head_dim, config.rotary_base, yarn), yarn_scale(yarn)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Move the first of each pair of neighbors into the first half of the last dim: the models' pairs are neighbors,
    those of `_Rotate` its two halves."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
