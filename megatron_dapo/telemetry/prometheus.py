"""A run's newest metrics over HTTP, in Prometheus' formats.

    rank 0                starts this module as a process, with the listening socket; the kernel ends it when rank 0 dies
    GET /metrics          the last rows of metrics.jsonl and evaluations.jsonl

Rank 0 has no thread for it: neither a scrape nor a slow client can delay a train step.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler

from megatron_dapo._version import __version__
from megatron_dapo.affinity import all_cpus
from megatron_dapo.files.linux import end_with_parent, ignore_launcher_signals, start_helper
from megatron_dapo.telemetry.metrics import (
    DISTILLED,
    EVALUATION_METRICS,
    RECORDED,
    REWARD_PART,
    SOURCE,
    SOURCE_METRICS,
    STEP_METRICS,
)

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.metrics_core import Metric

PREFIX = "megatron_dapo_"
LABEL = "name"  # a user's name for a part of the reward, a source, a figure of an environment
_REQUEST_S = 30.0  # limit for one read or write of a client
_TAIL_BYTES = 1 << 18  # a row has about 15 KB, and more with many sources
_NICE = 10
BY_TEACHER = (f"{DISTILLED}teacher/", f"{DISTILLED}source/")
_WITH_METRIC = (SOURCE, *BY_TEACHER)  # prefixes that a name and a metric follow


def exported_name(metric: str) -> tuple[str, str]:
    """Return the Prometheus name of a metric, and the value of its label `name`, "" if it has none.

    The name is the metric's with the prefix and "_" for "/". A name that a user chose is the label instead:
    `reward/part/NAME`, `episodes/recorded/NAME`, `rollout/source/NAME/METRIC`, `eval/NAME/METRIC`,
    `distillation/teacher/NAME/METRIC` and `distillation/source/NAME/METRIC`.
    """
    label = ""
    for prefix in (REWARD_PART, RECORDED, *_WITH_METRIC):
        if metric.startswith(prefix):
            metric, label = prefix.removesuffix("/"), metric.removeprefix(prefix)
            if prefix in _WITH_METRIC:
                label, _, name = label.rpartition("/")
                metric = f"{metric}/{name}"
    if metric.startswith("eval/"):
        label, _, name = metric.removeprefix("eval/").rpartition("/")
        metric = f"eval/{name}"
    return PREFIX + metric.replace("/", "_"), label


def _help() -> dict[str, str]:
    """Return the HELP text of each family by its Prometheus name."""
    schema = {name: f"{metric.meaning} [{metric.unit}]" for name, metric in {**STEP_METRICS, **EVALUATION_METRICS}.items()}
    named = {
        REWARD_PART: "mean of a part of the reward [reward]",
        RECORDED: "mean of a figure that the environment recorded of its episodes",
        **{f"{prefix}-/divergence": "mean divergence from the teachers over taught tokens [nat]" for prefix in BY_TEACHER},
        **{f"{SOURCE}-/{name}": meaning for name, meaning in SOURCE_METRICS.items()},
    }
    steps = {
        "train_step": "train step of the newest metrics [steps]",
        "train_step_timestamp_seconds": "when they were written [s since 1970]",
        "eval/train_step": "train step of the newest evaluation [steps]",
        "eval/train_step_timestamp_seconds": "when it was written [s since 1970]",
    }
    return {exported_name(name)[0]: text for name, text in {**schema, **named, **steps}.items()}


class RunCollector:
    """Collects the newest rows of a run's directory as gauges: after a resume, a count may be lower than before."""

    def __init__(self, run_directory: Path, run_name: str) -> None:
        self._directory, self._run_name = run_directory, run_name
        self._help = _help()

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one scrape. A run without a row has only `megatron_dapo_run_info`."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily(f"{PREFIX}run", "the run", {"run": self._run_name, "version": __version__})
        families: dict[str, GaugeMetricFamily] = {}
        for file, prefix in (("metrics.jsonl", ""), ("evaluations.jsonl", "eval/")):
            row, seconds = _newest_row(self._directory / file)
            if row:
                step = {f"{prefix}train_step": row.pop("train_step"), f"{prefix}train_step_timestamp_seconds": seconds}
                for metric, value in {**step, **row}.items():
                    name, label = exported_name(metric)
                    family = families.setdefault(
                        name, GaugeMetricFamily(name, self._help.get(name, ""), labels=[LABEL] if label else [])
                    )
                    # Metrics files have null for a value that is not finite.
                    labels = {LABEL: label} if label else {}
                    family.add_sample(name, labels, float("nan") if value is None else value)
        yield from families.values()


def _newest_row(path: Path) -> tuple[dict[str, float | None], float]:
    """Return the last complete row of a file of metrics and when it was written (s since 1970); {} and 0 without one."""
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            stream.seek(max(0, status.st_size - _TAIL_BYTES))
            lines = stream.read().rpartition(b"\n")[0].splitlines()
        return json.loads(lines[-1]), status.st_mtime
    except (OSError, ValueError, IndexError):
        return {}, 0.0


@contextmanager
def prometheus_endpoint(host: str, port: int, run_directory: Path, run_name: str) -> Iterator[None]:
    """Serve a run's metrics while the context is open; port 0 serves none.

    Raises ValueError if the package is missing or the address cannot be taken.
    """
    if not port:
        yield
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise ValueError(
            f"telemetry.prometheus_port = {port}: prometheus_client is not installed; pip install "
            "'megatron-dapo[prometheus]', or set it to 0"
        )
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ValueError(
            f"telemetry.prometheus_port = {port}: {error.strerror} on {socket.gethostname()}; choose another port, or 0 for none"
        ) from error
    with listener, all_cpus():
        settings = json.dumps([listener.fileno(), str(run_directory.absolute()), run_name])
        # Its output is the run's: an error of the server is a line of the log.
        server = start_helper(__name__, settings, packages=None, pass_fds=(listener.fileno(),), stderr=None)
    try:
        yield
    finally:
        server.kill()
        server.wait()


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: a scrape comes every few seconds."""


def _answer(environ: Mapping[str, Any], start_response: Any, metrics: Any) -> Iterable[bytes]:
    """Serve /metrics, and nothing else."""
    if environ["PATH_INFO"] == "/metrics":
        return metrics(environ, start_response)
    start_response("404 Not Found", [("Content-Type", "text/plain")])
    return [b"metrics are at /metrics\n"]


def main() -> None:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer

    ignore_launcher_signals()
    end_with_parent()
    os.nice(_NICE)
    descriptor, directory, name = json.loads(sys.argv[1])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(Path(directory), name))
    metrics = make_wsgi_app(registry)
    listener = socket.socket(fileno=descriptor)
    server = ThreadingWSGIServer(listener.getsockname()[:2], _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()[:2]
    server.setup_environ()
    server.set_app(lambda environ, start_response: _answer(environ, start_response, metrics))
    server.serve_forever()


if __name__ == "__main__":
    main()
