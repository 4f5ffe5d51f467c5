"""mbridge's export of the actor's own weights: every tensor whole, under its Hugging Face name, on every rank.

Runs inside the trainer's processes, on the very parameters that the other side sends. mbridge finds the owner of each
tensor by objects gathered over the pipeline group, broadcasts it there, gathers it over the tensor group, and splits it
into Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from mbridge.models.qwen2 import Qwen2Bridge
from transformers import AutoConfig

from megatron_dapo.megatron.actor import MegatronActor
from megatron_dapo.plan.memory import VOCABULARY_MULTIPLE


class MbridgeExport:
    """`dtype` is the actor's: by default mbridge would make bfloat16 of everything."""

    def __init__(self, model_directory: Path, actor: MegatronActor, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(model_directory)
        multiple = VOCABULARY_MULTIPLE * actor.layout.tensor
        self._bridge = Qwen2Bridge(config, dtype=dtype, make_vocab_size_divisible_by=multiple)
        # mbridge learns them when it builds the model; here the model is the actor's.
        self._bridge.vocab_size = config.vocab_size
        self._bridge.padded_vocab_size = -(-config.vocab_size // multiple) * multiple
        self._chunks = actor.chunks

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) one by one. Collective: exhaust it on every rank."""
        yield from self._bridge.export_weights(self._chunks)
