"""Packaging: the base install pulls no compiled CUDA package of its own beside torch; what needs one is an extra."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"', (ROOT / "megatron_dapo" / "__init__.py").read_text(encoding="utf-8"), re.M
).group(1)

BASE = [
    "torch>=2.6",
    "megatron-core>=0.16.1",
    "transformers>=5.0",
    "safetensors>=0.4.3",
    "numpy>=1.26",
    "packaging>=24.2",
    "pydantic>=2.7",
    "typer>=0.12",
    "rich>=13.8",
    "tensorboard>=2.16",
    # Pins the ANTLR runtime its parser was generated for; without the extra it would take any.
    "math-verify[antlr4_13_2]>=0.9",
    "pyarrow>=15",
    "httpx>=0.27",
    "aiohttp>=3.10",
    "pysimdjson>=7.0",
    "psutil>=5.9",  # without it megatron-core's checkpoint save waits for ever
    'tomli>=2.0; python_version < "3.11"',
]

EXTRAS = {
    "gpu": ["transformer-engine[pytorch]>=2.0"],
    "sglang": ["sglang>=0.5.17,<0.5.22"],
    "quantize": ["nvidia-modelopt>=0.47", "accelerate>=1.0"],  # tools.quantize
    "plots": ["matplotlib>=3.9"],  # pictures of `megatron-dapo ablate`
    "dev": ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "orjson>=3.10"],
}

setup(
    name="megatron-dapo",
    version=VERSION,
    description="DAPO, VAPO and T-PPO on Megatron-core: exact losses in any layout, verified weight sync, exact resume",
    python_requires=">=3.10,<3.13",
    packages=[*find_packages(include=["megatron_dapo", "megatron_dapo.*"]), "checkpoint_converters"],
    package_data={"megatron_dapo.nodes": ["reference.json"]},
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-dapo = megatron_dapo.cli.main:app"]},
)
