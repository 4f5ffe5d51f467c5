"""Weights of small Hugging Face models that make their distributions far from uniform."""

from __future__ import annotations

import torch


def spread_weights(model: torch.nn.Module) -> None:
    """Scale the model's matrices, and draw its vectors and the biases of its routers anew around what they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
