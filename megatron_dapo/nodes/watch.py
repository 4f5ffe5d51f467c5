"""The watch over all nodes of a run: which node is an outlier, and which rank is slowest in which phase.

    RUN/nodes/node_K.jsonl   every node's sampler writes them (nodes.sampler)
    main                     a separate process on the node of rank 0, at the lowest priority: it reads what is new, and every
                             period runs the detector (nodes.detection) and writes alerts.jsonl, stragglers.json, attempts.jsonl
    NodeWatch                rank 0 starts it and reads its messages: a log line, metrics of the next step, and with
                             action "exclude" a stop as by SIGTERM: a checkpoint, then exit code 75

Ranks never wait for it. The kernel ends the process with rank 0.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dapo.affinity import all_cpus
from megatron_dapo.files.durable import DirectoryReplaced, HeldDirectory
from megatron_dapo.files.linux import start_helper
from megatron_dapo.nodes import MIN_NODES
from megatron_dapo.nodes.records import ALERTS, alert_line, parse_lines
from megatron_dapo.nodes.sampler import SAMPLE_S, become_helper, flush_seconds
from megatron_dapo.nodes.samples import METRICS, NodeAlert, NodeSeries, align
from megatron_dapo.watch.attempts import record_alert

logger = logging.getLogger(__name__)

DIRECTORY = "nodes"  # subdirectory of the run directory
STRAGGLERS = "stragglers.json"
_NICE = 19
_WINDOW_PERIODS = 15 / 8  # the published detector looks every 8 minutes at the last 15
_MIN_SHARE = 0.01  # Phases below this share of a period are not compared.
_END_S = 2.0


@dataclass(frozen=True)
class WatchSettings:
    """The watch over a run's nodes, as rank 0 starts it."""

    directory: str  # run directory
    attempt: int
    num_nodes: int
    period_s: float
    continuity_s: float
    similarity_threshold: float
    action: str  # "warn" or "exclude"
    phases: Sequence[str]  # phases in which ranks are compared
    has_detector: bool  # False: only ranks are compared

    @property
    def window_s(self) -> float:
        return max(_WINDOW_PERIODS * self.period_s, 2 * self.continuity_s)


@dataclass(frozen=True)
class Straggler:
    """The rank that worked longest in a phase."""

    phase: str
    rank: int
    node: str
    seconds: float  # CPU and run-queue time in the period
    median: float  # median of all ranks that worked in it

    @property
    def over_median(self) -> float:
        return self.seconds / self.median - 1.0


def find_stragglers(
    worked: Mapping[int, Mapping[str, float]], nodes: Mapping[int, str], phases: Sequence[str], period_s: float
) -> list[Straggler]:
    """Return the slowest rank of each of `phases` in which at least two ranks worked long enough to compare them.

    worked: seconds of work in the period by rank and phase. nodes: host name by rank.
    """
    stragglers = []
    for phase in phases:
        seconds = {rank: each[phase] for rank, each in worked.items() if each.get(phase, 0.0) > 0}
        if len(seconds) > 1 and median(seconds.values()) >= _MIN_SHARE * period_s:
            rank = max(seconds, key=lambda each: (seconds[each], -each))
            stragglers.append(Straggler(phase, rank, nodes[rank], seconds[rank], median(seconds.values())))
    return stragglers


class NodeFile:
    """The file of one node, read as it grows."""

    def __init__(self, path: Path, since: float) -> None:
        """since: earlier samples belong to another attempt, perhaps on another host."""
        self._path, self._since = path, since
        self._identity, self._offset, self._torn = 0, 0, b""
        self._header = ""
        self.series = NodeSeries(-1, "", "", ())
        self.seconds: dict[int, dict[str, tuple[float, float]]] = {}  # newest, by rank and phase

    def read(self, keep_since: float) -> None:
        """Read what is new, and drop samples before `keep_since`. An unreadable file has nothing new."""
        lines = self._new_lines()
        for index, line in enumerate(lines):
            if '"metrics"' in line:
                self._header, self.seconds = line, {}
                self.series, lines = replace(self.series, samples=()), lines[index:]
        for line in lines:
            if '"seconds_of_ranks"' in line:
                entry = json.loads(line)
                if entry["t"] >= self._since:
                    self.seconds = {int(rank): phases for rank, phases in entry["seconds_of_ranks"].items()}
        if self._header:
            new, oldest = parse_lines([self._header, *lines]), max(keep_since, self._since)
            known = self.series.samples
            first = bisect.bisect_left(known, oldest, key=lambda sample: sample.time)
            added = [sample for sample in new.samples if sample.time >= oldest]
            self.series = replace(new, samples=[*known[first:], *added])

    def _new_lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != self._identity or status.st_size < self._offset:
                    # The sampler has begun a new file; its last writes to the old one cover at most a few seconds.
                    self._identity, self._offset, self._torn = status.st_ino, 0, b""
                stream.seek(self._offset)
                text = stream.read()
        except OSError:
            return []
        self._offset += len(text)
        *whole, self._torn = (self._torn + text).split(b"\n")
        return [line.decode(errors="replace") for line in whole if line.startswith(b"{") and line.endswith(b"}")]


class RunWatch:
    def __init__(self, settings: WatchSettings, started: float) -> None:
        """started: seconds since 1970; older samples do not count."""
        self._settings = settings
        self._run_directory = HeldDirectory(Path(settings.directory))
        self._directory = Path(settings.directory) / DIRECTORY
        self._files = {
            node: NodeFile(self._directory / f"node_{node}.jsonl", started) for node in range(settings.num_nodes)
        }
        self._worked: dict[int, dict[str, float]] = {}  # rank -> phase -> seconds so far
        self._told: dict[tuple[str, str], float] = {}  # node and metric -> when an alert was last seen
        self._is_stopping = False

    def read(self, now: float) -> None:
        """Read what is new."""
        for file in self._files.values():
            file.read(now - self._settings.window_s)

    def look(self, now: float) -> dict[str, Any]:
        """Read what is new and return what to report: "alerts", "stragglers", and "exclude" for a node to drop."""
        self.read(now)
        stragglers = self._stragglers()
        alerts = [alert for alert in self._detect(now) if self._is_news(alert, now)]
        excluded = ""
        if alerts and self._settings.action == "exclude" and not self._is_stopping:
            self._is_stopping, excluded = True, alerts[0].node
        for alert in alerts:
            self._record(alert, excluded)
        return {
            "alerts": [{**asdict(alert), "text": str(alert)} for alert in alerts],
            "stragglers": stragglers,
            "exclude": excluded,
        }

    def _detect(self, now: float) -> list[NodeAlert]:
        series = [file.series for file in self._files.values() if file.series.samples]
        if not self._settings.has_detector or len(series) < MIN_NODES:
            return []
        # The detector needs torch, which is loaded only if there are nodes to compare.
        from megatron_dapo.nodes.denoiser import reference_denoisers
        from megatron_dapo.nodes.detection import DetectorSettings, detect

        # Every node has written its samples up to that time.
        end = now - flush_seconds(self._settings.period_s) - 2 * SAMPLE_S
        num_seconds = int(min(self._settings.window_s, end - min(one.samples[0].time for one in series)))
        if num_seconds < 1:
            return []
        samples = align(series, METRICS, num_seconds, end)
        settings = DetectorSettings(round(self._settings.continuity_s), self._settings.similarity_threshold)
        alert = detect(samples, settings, reference_denoisers())
        return [] if alert is None else [alert]

    def _stragglers(self) -> list[dict[str, Any]]:
        total, nodes = {}, {}
        for file in self._files.values():
            for rank, phases in file.seconds.items():
                total[rank] = {phase: worked for phase, (_, worked) in phases.items()}
                nodes[rank] = file.series.name
        before, self._worked = self._worked, total
        worked = {
            rank: {phase: seconds - before.get(rank, {}).get(phase, 0.0) for phase, seconds in phases.items()}
            for rank, phases in total.items()
        }
        stragglers = find_stragglers(worked, nodes, self._settings.phases, self._settings.period_s)
        told = [{**asdict(each), "over_median": each.over_median} for each in stragglers]
        self._write(STRAGGLERS, json.dumps(told))
        return told

    def _is_news(self, alert: NodeAlert, now: float) -> bool:
        """Return True for an alert that the last window did not have."""
        key = alert.node, alert.metric
        last, self._told[key] = self._told.get(key, -float("inf")), now
        return now - last > self._settings.window_s

    def _record(self, alert: NodeAlert, excluded: str) -> None:
        self._write(ALERTS, alert_line(alert), "a")
        try:
            self._run_directory.require()
            record_alert(Path(self._settings.directory), self._settings.attempt, asdict(alert), excluded)
        except (OSError, DirectoryReplaced) as error:
            print_line({"problem": f"{self._settings.directory}: the alert could not be recorded: {error}"})

    def _write(self, name: str, text: str, mode: str = "w") -> None:
        try:
            self._run_directory.require()
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(self._directory / name, mode, encoding="utf-8") as stream:
                stream.write(text)
        except (OSError, DirectoryReplaced) as error:
            print_line({"problem": f"{self._directory / name} could not be written: {error}"})


def print_line(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Watch the run that the command line describes until rank 0 ends."""
    starter = os.getppid()
    become_helper(_NICE)
    settings = WatchSettings(**json.loads(sys.argv[1]))
    watch = RunWatch(settings, time.time())
    due = time.monotonic() + settings.period_s
    while os.getppid() == starter:
        time.sleep(max(0.0, min(due - time.monotonic(), flush_seconds(settings.period_s))))
        start = time.monotonic()
        try:
            if start < due:
                # Parsing is most of the work: it is done as nodes write, so that a decision waits for little of it.
                watch.read(time.time())
                continue
            told = watch.look(time.time())
        except Exception as error:  # a failing watch must say so once, without harm to the run
            print_line({"problem": f"the watch over the nodes has ended: {error!r}"})
            return
        due = max(due + settings.period_s, start)
        print_line({**told, "seconds": time.monotonic() - start})


class NodeWatch:
    def __init__(self, settings: WatchSettings) -> None:
        """Start the watch. It ends with this process, or by `close`."""
        self.num_alerts = 0
        self.stragglers: Sequence[Mapping[str, Any]] = ()  # the last look's, as JSON
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with all_cpus():
            self._process = start_helper(
                "megatron_dapo.nodes.watch",
                json.dumps(asdict(settings)),
                packages=None,
                environment=environment,
                stdout=subprocess.PIPE,
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=[self._process.stdout], name="node watch", daemon=True).start()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)

    def _listen(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.hear(json.loads(line))

    def hear(self, message: Mapping[str, Any]) -> None:
        """Log what the watch has found, and stop the run if a node is to be left out."""
        if "problem" in message:
            logger.warning("%s", message["problem"])
            return
        self.stragglers = message["stragglers"]
        for alert in message["alerts"]:
            self.num_alerts += 1
            logger.warning("faulty node: %s; docs/nodes.md says what to do", alert["text"])
        if message["exclude"]:
            logger.warning("%s is to be left out: stopping with a checkpoint (nodes.action)", message["exclude"])
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
