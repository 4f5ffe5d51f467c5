"""Lines of `nodes/node_K.jsonl`, the samples of one node of a run, and of `nodes/alerts.jsonl`.

A header names the node and the order of its metrics, then each line is one second. The writer starts a new header after a
restart, and renames a large file to `node_K.jsonl.1`, which readers read first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dapo.nodes.samples import NodeAlert, NodeSample, NodeSeries

ALERTS = "alerts.jsonl"
_HEADER: dict[str, type] = {"node": int, "name": str, "role": str, "metrics": list}
_SAMPLE: dict[str, type | tuple[type, ...]] = {"t": (int, float), "phase": str, "step": int, "v": list}


def alert_line(alert: NodeAlert) -> str:
    return json.dumps(asdict(alert)) + "\n"


def read_nodes(directory: Path) -> list[NodeSeries]:
    """Return the samples of every node in `directory`, by node number. Raises ValueError if there is no node's file."""
    files = {int(path.stem.split("_")[1]): path for path in directory.glob("node_*.jsonl") if path.stem[5:].isdigit()}
    if not files:
        raise ValueError(f"{directory} has no node_K.jsonl: the run has not sampled its nodes")
    return [_read_node(files[node]) for node in sorted(files)]


def read_alerts(directory: Path) -> list[NodeAlert]:
    path = directory / ALERTS
    entries = [_object(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    try:
        return [NodeAlert(**entry) for entry in entries if entry]
    except TypeError as error:
        raise ValueError(f"{path}: not alerts of this version: {error}") from None


def parse_lines(lines: Iterable[str]) -> NodeSeries:
    """Return the samples of one node. A line cut short, as by a full disk, is left out.

    Raises ValueError if there is no header.
    """
    header: dict[str, Any] = {}
    samples: list[NodeSample] = []
    for line in lines:
        entry = _object(line)
        if all(isinstance(entry.get(key), kind) for key, kind in _HEADER.items()):
            header = entry
        elif header and all(isinstance(entry.get(key), kind) for key, kind in _SAMPLE.items()):
            pairs = zip(header["metrics"], entry["v"])
            values = {name: float(value) for name, value in pairs if isinstance(value, (int, float))}
            samples.append(NodeSample(entry["t"], values, entry["phase"], entry["step"]))
    if not header:
        raise ValueError("no header line: not the samples of a node")
    samples.sort(key=lambda sample: sample.time)
    return NodeSeries(header["node"], header["name"], header["role"], samples)


def _read_node(path: Path) -> NodeSeries:
    try:
        return parse_lines(_lines(path))
    except ValueError as error:  # also for bytes that are not text
        raise ValueError(f"{path}: {error}") from None


def _lines(path: Path) -> list[str]:
    older = path.with_name(path.name + ".1")
    return [line for each in (older, path) if each.exists() for line in each.read_text("utf-8").splitlines()]


def _object(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
