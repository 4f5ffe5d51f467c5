"""Denoiser of one metric: an LSTM variational autoencoder of windows (Minder, arXiv 2411.01791, section 4.2).

    window [8] -> LSTM, 4 hidden -> mean and log variance of a latent [8] -> LSTM, 4 hidden -> window [8]

Trained on normal data, it reproduces the metric's pattern and level but not its noise; nodes are compared by its
output. Each metric has a separate model: the paper found a single model for all metrics to be worse.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

WINDOW, HIDDEN, LATENT = 8, 4, 8  # the paper's
ANY_METRIC = "any"  # the model for metrics without a separate one
REFERENCE = Path(__file__).with_name("reference.json")
_ROWS = 65_536  # windows in one pass


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


def from_json(text: str) -> dict[str, Denoiser]:
    """Return the denoisers that tools/make_node_models.py wrote, by metric. Raises ValueError for any other text."""
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
