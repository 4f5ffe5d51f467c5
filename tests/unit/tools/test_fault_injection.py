"""The chaos harness's own judgement: what it counts, compares and matches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_dapo.config.loader import load_config
from megatron_dapo.config.validator import validate
from megatron_dapo.watch.failure import Failure, first_line
from tools.fault_injection.cells import CELLS, FAULTS, MEANINGLESS, PHASES, TINY
from tools.fault_injection.cluster_run import CONFIGURATIONS, FIRST_FAILURE, QUICKSTART, layout_text
from tools.fault_injection.outcome import is_cause_printed, lost_responses, place_of, unaccounted_responses


def write_run(directory: Path, batches: dict[int, list[str]], dumped: dict[int, list[str]] | None = None) -> Path:
    """Write samples and dumps of train steps."""
    for step, ids in (batches if dumped is None else dumped).items():
        dump = directory / "batches" / f"step_{step:06d}"
        dump.mkdir(parents=True)
        (dump / "batch.json").write_text(json.dumps({"samples": {"sample_ids": ids}}))
    lines = [json.dumps({"train_step": step, "sample_id": name}) for step, ids in batches.items() for name in ids]
    (directory / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_every_cell_is_meaningful_or_has_a_reason() -> None:
    assert set(CELLS) | set(MEANINGLESS) == {(fault, phase) for fault in FAULTS for phase in PHASES}
    assert not set(CELLS) & set(MEANINGLESS) and set(TINY) <= set(CELLS) and len(TINY) == 8
    assert all(MEANINGLESS.values())


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_every_configuration_is_one_that_starts(configuration: str, tmp_path: Path) -> None:
    layout = tmp_path / "layout.toml"
    layout.write_text(layout_text(tmp_path / "out", configuration, Path(sys.executable), num_processes=2, keep=3))
    config = load_config(layout, [f"model.path={QUICKSTART / 'base_model'}"]).config
    assert not validate(config, world_size=2)
    assert config.rollout.engine == ("sglang" if configuration.startswith("servers") else "embedded")


def test_lost_and_repeated_responses_are_counted(tmp_path: Path) -> None:
    whole = {1: ["a", "b"], 2: ["c", "d"]}
    assert unaccounted_responses(write_run(tmp_path / "whole", whole), 2) == 0
    assert unaccounted_responses(write_run(tmp_path / "twice", {1: ["a", "b"], 2: ["b", "c"]}), 2) == 1
    assert unaccounted_responses(write_run(tmp_path / "lost", whole, {1: ["a", "b"], 2: ["c"]}), 2) == 1
    assert unaccounted_responses(write_run(tmp_path / "gap", {1: ["a", "b"]}), 2) == 1, "step 2 has no batch"
    assert lost_responses(tmp_path / "whole", tmp_path / "twice", 2) == 1, "d"
    assert lost_responses(tmp_path / "whole", tmp_path / "whole", 2) == 0


@pytest.mark.parametrize("failure", [
    Failure(3, "signal", "killed by signal 9 (SIGKILL)", "node1", "train", attempt=2),
    Failure(-1, "node lost", "node lost with rank 1: no sign of life for 9 s", "node1", "generate"),
    Failure(0, "hang", "silent for 13 s", "node0"),
], ids=lambda failure: failure.cause)  # fmt: skip
def test_the_printed_line_names_node_and_rank(failure: Failure) -> None:
    line = first_line(failure)
    assert FIRST_FAILURE.findall(f"[rank 0] INFO x\n{line}\nrank 1: as a consequence: ...") == [line]
    assert place_of(line) == (failure.node, failure.rank)
    causes = [cause for fault in FAULTS.values() for cause in fault.causes if is_cause_printed(cause, line)]
    assert set(causes) == {failure.cause} - {"hang"}
