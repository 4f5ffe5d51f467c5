"""Settings of NCCL that trainer and engine ranks must have alike to be members of one communicator.

SGLang sets two of them in its processes unless they are set. A trainer that weight syncs connect to them by NCCL takes the
same values, and servers inherit what it has; servers started elsewhere, or by a script, may have others.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

SGLANG_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}  # sglang/srt/entrypoints/engine.py, 0.5.17
# How members open each other's memory, the transport they take, and the size of what they exchange.
AGREED = (
    *SGLANG_DEFAULTS,
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
)


def take_defaults_of_sglang(environment: MutableMapping[str, str]) -> None:
    """Set what SGLang would set in its own processes. Before NCCL is initialized, and before servers inherit it."""
    for name, value in SGLANG_DEFAULTS.items():
        environment.setdefault(name, value)


def agreed_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that must be alike; "" for one that is not set."""
    return {name: environment.get(name, "") for name in AGREED}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], our_name: str, their_name: str) -> str:
    """Return the first setting that differs, with both values; "" if none does."""
    for name in ours:
        if ours[name] != theirs.get(name, ""):
            mine, other = ours[name] or "not set", theirs.get(name) or "not set"
            return f"{name} is {mine} {our_name} and {other} {their_name}"
    return ""
