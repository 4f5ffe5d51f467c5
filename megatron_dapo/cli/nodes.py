"""`megatron-dapo nodes`: a picture of a run's nodes over time, and their alerts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.options import JsonOption, refusing

TERMINAL_POINTS = 80


def nodes(
    run: Annotated[Path, typer.Argument(help="a run's directory")],
    seconds: Annotated[int, typer.Option(min=1, help="newest seconds that are shown and searched")] = 900,
    metric: Annotated[
        str | None, typer.Option(help="metric to show; default: an alert's, or the one in which a node differs most")
    ] = None,
    continuity: Annotated[
        int, typer.Option(min=1, help="seconds that a node must stand out, for a run without alerts")
    ] = 120,
    svg: Annotated[
        Path | None, typer.Option(help="file for the picture; default: nodes/timeline.svg in the run")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show the metrics of a run's nodes over time, and the node that stands out.

    The alerts are those that the run recorded; a run without any is searched now.

    Exit code: 0 none stands out or too early to say, 1 one does, 2 arguments or files that cannot be read.
    """
    from megatron_dapo.nodes.denoiser import reference_denoisers
    from megatron_dapo.nodes.detection import DetectorSettings, detect
    from megatron_dapo.nodes.records import read_alerts, read_nodes
    from megatron_dapo.nodes.samples import METRICS, SHOWN_METRICS, NodeMetric, align
    from megatron_dapo.nodes.timeline import timeline, to_lines, to_svg

    directory, picture = run / "nodes", svg or run / "nodes/timeline.svg"
    settings = DetectorSettings(continuity_s=continuity)
    with refusing(ValueError, OSError):
        if (run / "config.json").is_file() and not directory.is_dir():
            raise ValueError(
                f"{run} has no metrics of nodes: runs of one node have none, as nodes are compared with each other; of several "
                "nodes they need nodes.stragglers or nodes.detector = true"
            )
        series = read_nodes(directory)
        sampled = [one for one in series if one.samples]
        if not sampled:
            raise ValueError(f"{directory}: {len(series)} nodes have no sample yet; they have one a second of a run")
        stored = {name for one in sampled for sample in one.samples[-seconds:] for name in sample.values}
        known = {each.name: each for each in (*METRICS, *SHOWN_METRICS)}
        metrics = [each for name, each in known.items() if name in stored]
        metrics += [NodeMetric(name, "", 0.0) for name in sorted(stored - known.keys())]
        newest, oldest = max(one.samples[-1].time for one in sampled), min(one.samples[0].time for one in sampled)
        span = min(seconds, int(newest) - int(oldest) + 1)
        samples = align(series, metrics, span)
        alerts = [alert for alert in read_alerts(directory) if alert.since + alert.seconds >= samples.start]
        remarks = [str(alert) for alert in alerts]
        if span < settings.seconds_needed:
            remarks.append(
                f"{span} s of samples: too short to look for a faulty node, which needs {settings.seconds_needed} s"
            )
        elif not alerts:
            compared = align(series, [each for each in metrics if each in METRICS], span)
            alert = detect(compared, settings, reference_denoisers())
            alerts = [alert] if alert else []
            remarks.append(f"{alert} (not recorded by the run; found now)" if alert else "no node stands out")
        lines = to_lines(timeline(samples, alerts, metric, TERMINAL_POINTS))
        picture.write_text(to_svg(timeline(samples, alerts, metric)), encoding="utf-8")
    if json_output:
        typer.echo(json.dumps({"alerts": [asdict(alert) for alert in alerts], "remarks": remarks}))
    else:
        typer.echo("\n".join([*lines, *remarks, f"picture: {picture}"]))
    raise typer.Exit(1 if alerts else 0)
