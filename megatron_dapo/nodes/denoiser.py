"""Denoiser of one metric: an LSTM variational autoencoder of windows (Minder, arXiv 2411.01791, section 4.2).

    window [8] -> LSTM, 4 hidden -> mean and log variance of a latent [8] -> LSTM, 4 hidden -> window [8]

Trained on normal data, it reproduces the metric's pattern and level but not its noise; nodes are compared by its
output. Each metric has a separate model: the paper found a single model for all metrics to be worse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

WINDOW, HIDDEN, LATENT = 8, 4, 8  # the paper's
ANY_METRIC = "any"  # the model for metrics without a separate one
REFERENCE = Path(__file__).with_name("reference.json")
_ROWS = 65_536  # windows in one pass
_KL_WEIGHT = 1e-5


class Denoiser(nn.Module):
    """LSTM-VAE of windows of one metric, scaled to [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(1, HIDDEN, batch_first=True)
        self.latent = nn.Linear(HIDDEN, 2 * LATENT)
        self.decoder = nn.LSTM(LATENT, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, 1)

    def forward(self, batch: torch.Tensor, noise: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reconstruction of `batch`, both [num, size], and the mean KL divergence of the latents from N(0, 1).

        noise: [num, LATENT] standard normal values that sample the latents; None uses their means.
        """
        _, (hidden, _) = self.encoder(batch[:, :, None])
        mean, log_variance = self.latent(hidden[-1]).chunk(2, dim=1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean()
        latent = mean if noise is None else mean + (0.5 * log_variance).exp() * noise
        states, _ = self.decoder(latent[:, None].expand(-1, batch.shape[1], -1))
        return self.output(states)[:, :, 0], divergence

    @torch.no_grad()
    def denoise(self, batch: torch.Tensor) -> torch.Tensor:
        """Return `batch` [..., size] without its noise."""
        rows = batch.reshape(-1, batch.shape[-1])
        return torch.cat([self(part)[0] for part in rows.split(_ROWS)]).reshape(batch.shape)


def fit(
    rows: np.ndarray, seed: int = 0, num_steps: int = 2000, start: Denoiser | None = None
) -> tuple[Denoiser, float]:
    """Return a denoiser trained on windows of normal data, and its mean squared error on held-out windows.

    rows: [num, size], scaled to [0, 1]. start: continues from its weights, as a refit in the first minutes of a run does.
    A call scales each metric by its extremes, so one node's fault shrinks the range of the others. Windows are
    therefore shrunk and shifted at random within [0, 1], so that the model sees all levels. Raises ValueError for too
    few rows and for NaN.
    """
    if len(rows) < 2 or rows.ndim != 2:
        raise ValueError(f"windows of the shape {rows.shape}: needs at least 2 rows to train on and to check")
    if not np.isfinite(rows).all():
        raise ValueError("windows hold NaN or infinite values: fill the gaps first")
    generator = torch.Generator().manual_seed(seed)
    data = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
    data = data[torch.randperm(len(data), generator=generator)]
    num_held = max(1, min(2000, len(data) // 10))
    held, data = data[:num_held], data[num_held:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Denoiser()
    if start is not None:
        model.load_state_dict(start.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps))
    )
    for _ in range(num_steps):
        batch = data[torch.randint(len(data), (min(256, len(data)),), generator=generator)]
        scale, shift = torch.rand(2, len(batch), 1, generator=generator)
        batch = batch * scale + shift * (1 - scale)
        found, divergence = model(batch, torch.randn(len(batch), LATENT, generator=generator))
        loss = (found - batch).square().mean() + _KL_WEIGHT * divergence
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval(), float((model.denoise(held) - held).square().mean())


def to_json(denoisers: Mapping[str, Denoiser], notes: Mapping[str, Any]) -> str:
    """Return denoisers by metric as JSON, weights to 5 digits, with `notes` on how they were made."""
    models = {
        name: {key: _rounded(value.tolist()) for key, value in model.state_dict().items()}
        for name, model in denoisers.items()
    }
    return json.dumps({"window": WINDOW, "notes": dict(notes), "models": models}, separators=(",", ":")) + "\n"


def from_json(text: str) -> dict[str, Denoiser]:
    """Return the denoisers that `to_json` wrote. Raises ValueError for any other text."""
    try:
        found = json.loads(text)
        denoisers = {}
        for name, state in found["models"].items():
            denoisers[name] = Denoiser().eval()
            denoisers[name].load_state_dict({key: torch.tensor(value) for key, value in state.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"not denoisers of this version: {reason}; make them with tools/make_node_models.py") from None
    return denoisers


def reference_denoisers() -> dict[str, Denoiser]:
    """Return the denoisers of the package, trained on simulated normal data by tools/make_node_models.py."""
    return from_json(REFERENCE.read_text(encoding="utf-8"))


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else float(f"{values:.5g}")
