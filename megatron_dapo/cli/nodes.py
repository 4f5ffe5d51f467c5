"""`megatron-dapo nodes`: reads the samples of a run's nodes, and returns the picture and the alerts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.nodes.denoiser import reference_denoisers
from megatron_dapo.nodes.detection import DetectorSettings, detect
from megatron_dapo.nodes.records import read_alerts, read_nodes
from megatron_dapo.nodes.samples import METRICS, SHOWN_METRICS, NodeAlert, NodeMetric, align
from megatron_dapo.nodes.timeline import NodeTimeline, timeline

TERMINAL_POINTS = 80


@dataclass(frozen=True)
class NodeReport:
    """State of a run's nodes: a picture for a terminal, one for a file, the alerts, and remarks."""

    shown: NodeTimeline
    drawn: NodeTimeline
    alerts: tuple[NodeAlert, ...]
    remarks: tuple[str, ...]


def report_nodes(run: Path, seconds: int, metric: str | None, settings: DetectorSettings) -> NodeReport:
    """Return the report of the newest `seconds` seconds of a run.

    The alerts are those that the run recorded; a run without any is searched now. Raises ValueError for a directory without
    samples, and for an unknown metric.
    """
    directory = run / "nodes"
    series = read_nodes(directory)
    stored = {name for one in series for sample in one.samples[-seconds:] for name in sample.values}
    known = {each.name: each for each in (*METRICS, *SHOWN_METRICS)}
    metrics = [each for name, each in known.items() if name in stored]
    metrics += [NodeMetric(name, "", 0.0) for name in sorted(stored - known.keys())]
    newest = [one.samples[-1].time for one in series if one.samples]
    oldest = [one.samples[0].time for one in series if one.samples]
    if not newest:
        raise ValueError(f"{directory}: {len(series)} nodes have no sample yet; they have one a second of a run")
    span = min(seconds, int(max(newest)) - int(min(oldest)) + 1)
    samples = align(series, metrics, span)
    alerts = [alert for alert in read_alerts(directory) if alert.since + alert.seconds >= samples.start]
    remarks = [f"{alert}" for alert in alerts]
    if span < settings.seconds_needed:
        remarks.append(
            f"{span} s of samples: too short to look for a faulty node, which needs {settings.seconds_needed} s"
        )
    elif not alerts:
        compared = align(series, [each for each in metrics if each in METRICS], span)
        found = detect(compared, settings, reference_denoisers())
        alerts = [found] if found else []
        remarks.append(f"{found} (not recorded by the run; found now)" if found else "no node stands out")
    return NodeReport(
        timeline(samples, alerts, metric, TERMINAL_POINTS),
        timeline(samples, alerts, metric),
        tuple(alerts),
        tuple(remarks),
    )
