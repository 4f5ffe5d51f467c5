"""Prompts for calibrating and checking a quantization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompts:
    """Prompts for calibration, and different ones for the check."""

    path: Path
    template: str = "chat"
    max_prompt_tokens: int = 2048
    num_calibration: int = 64
    num_check: int = 32
    response_tokens: int = 256
    seed: int = 0
