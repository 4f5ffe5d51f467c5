"""Ranks run next to their GPU, and what they start on all CPUs of the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dapo.affinity import cpus_near, parsed_cpu_list

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3\n", {0, 1, 2, 3}),
        ("0-1,48-49\n", {0, 1, 48, 49}),  # hyper-threads of two cores
        ("7", {7}),
        ("", set()),  # a device without a node
    ],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parsed_cpu_list(text) == cpus


def test_a_gpu_has_the_cpus_of_its_node(tmp_path: Path) -> None:
    for address, text in (("0000:1b:00.0", "0-47,96-143\n"), ("0000:9d:00.0", "garbage\n")):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(text)
    assert cpus_near("0000:1b:00.0", tmp_path) == {*range(48), *range(96, 144)}
    assert cpus_near("0000:9d:00.0", tmp_path) == cpus_near("0000:ff:00.0", tmp_path) == set()


PROGRAM = """
import os, subprocess, sys
from megatron_dapo.affinity import all_cpus, bind
cpus = frozenset(os.sched_getaffinity(0))
one = frozenset(sorted(cpus)[:1])
child = [sys.executable, "-S", "-c", "import os; print(len(os.sched_getaffinity(0)))"]
count = lambda: int(subprocess.run(child, capture_output=True, check=True).stdout)
assert bind(frozenset({1 << 20})) == frozenset() and count() == len(cpus), "a node of which nothing is allowed"
assert bind(one | {1 << 20}) == one and count() == 1
with all_cpus():
    assert count() == len(cpus)
assert os.sched_getaffinity(0) == one
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs sched_setaffinity")
def test_a_bound_process_starts_others_on_all_cpus() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-S", "-c", PROGRAM], env=environment, check=True, timeout=60)
