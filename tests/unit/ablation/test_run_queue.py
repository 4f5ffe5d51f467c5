from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dapo.ablation import command
from megatron_dapo.ablation.command import ablate
from megatron_dapo.ablation.run_queue import Limits, RunQueue, run_environment
from megatron_dapo.ablation.runs import RESULTS, append_record, matching, read_records, record_of
from megatron_dapo.run.plan import ONE_NODE_OF_CPUS
from tests.unit.ablation.conftest import COMMAND, GRID, planned

WriteGrid = Callable[..., Path]
ONE_AT_A_TIME = Limits()
FAST = "set.run.stopped_timeout_seconds = 0.01\nset.run.total_steps = 4"
CRITIC = f'{FAST}\nset.algorithm.name = "vapo"\nset.rollout.filter_groups = false'


def make(path: Path, limits: Limits = ONE_AT_A_TIME, commit: str = "abc"):
    grid, runs = planned(path, commit)
    results = grid.output_dir / RESULTS
    on_record = {record["settings"] for record in matching(read_records(results), runs, commit)}
    left = [run for run in runs if run.settings not in on_record]

    def keep(run):
        record = record_of(run, grid, commit)
        append_record(results, record)
        return record

    return RunQueue(keep, limits, tell=print, command=COMMAND).make(left), runs


def starts(run) -> list[str]:
    return (run.directory / "starts.txt").read_text().split("\n")[:-1]


def test_a_call_ends_at_its_limit_and_the_next_one_makes_the_rest(write_grid: WriteGrid) -> None:
    path = write_grid(GRID.replace("set.run.total_steps = 4", FAST))
    first, runs = make(path, Limits(max_runs=1))
    assert [(record["variant"], record["seed"]) for record in first.records] == [("GRPO", 1)]
    assert first.was_stopped and not first.failures
    second, _ = make(path, Limits(jobs=2))
    assert len(second.records) == 3 and not second.was_stopped
    third, _ = make(path)
    assert third.records == [] and not third.was_stopped
    assert all(len(starts(run)) == 1 for run in runs)
    records = read_records(path.parent / "runs" / RESULTS)
    assert {(record["variant"], record["seed"]) for record in records} == {(run.variant.name, run.seed) for run in runs}
    assert [record["after"] for record in records if record["variant"] == "GRPO" and record["seed"] == 1] == [
        [0.5, 0.5, 0.0, 0.0, 0.0]
    ]
    # Another commit's results are no results of this one.
    assert len(make(path, Limits(max_runs=1), commit="def")[0].records) == 1


def test_the_time_limit_stops_a_run_with_a_checkpoint_and_it_continues(write_grid: WriteGrid) -> None:
    path = write_grid(
        GRID.replace("set.run.total_steps = 4", "set.run.stopped_timeout_seconds = 0.1\nset.run.total_steps = 30")
    )
    first, _ = make(path, Limits(seconds=2.0))
    assert first.records == [] and first.was_stopped and not first.failures
    second, _ = make(path, Limits(max_runs=1))
    assert [record["train_step"] for record in second.records] == [list(range(1, 31))]


def test_a_run_that_ended_without_a_record_is_read_not_made_again(write_grid: WriteGrid) -> None:
    path = write_grid(GRID.replace("set.run.total_steps = 4", FAST))
    first, _ = make(path, Limits(max_runs=1))
    results = path.parent / "runs" / RESULTS
    results.write_text(results.read_text()[:40])  # a kill has torn the line
    second, runs = make(path, Limits(max_runs=1))
    assert second.records == first.records
    assert (runs[0].directory / "metrics.jsonl").read_text().count("\n") == 4
    assert len(read_records(results)) == 1


def test_a_failed_run_is_one_line_and_the_others_are_made(write_grid: WriteGrid) -> None:
    text = GRID.replace("set.run.total_steps = 4", FAST).replace(
        'name = "GRPO"', 'name = "GRPO"\nset.optimizer.learning_rate = 666.0'
    )
    text += "set.optimizer.learning_rate = 1e-6\n"
    result, _ = make(write_grid(text), Limits(jobs=2))
    assert len(result.records) == 2
    assert len(result.failures) == 2
    assert all(
        line.startswith("GRPO, seed") and "exit code 1: the loss is not finite (see " in line
        for line in result.failures
    )


def test_runs_that_share_a_critic_wait_for_its_pretraining(write_grid: WriteGrid) -> None:
    text = GRID.replace("set.run.total_steps = 4", CRITIC).replace(
        "[[variants]]", "[[variants]]\npretrain_value = true"
    )
    result, runs = make(write_grid(text), Limits(jobs=2))
    assert len(result.records) == 4 and not result.failures
    critics = {run.critic_directory for run in runs}
    assert len(critics) == 2
    assert all((each / "starts.txt").read_text().startswith("pretrain-value") for each in critics)
    assert all((each / "starts.txt").read_text().count("\n") == 1 for each in critics)
    assert [record["pretrain_seconds"] for record in result.records] == [1.5] * 4


def test_a_program_trains_in_the_place_of_train(write_grid: WriteGrid, tmp_path: Path) -> None:
    other = f'import runpy, sys\nsys.argv.insert(1, "train")\nrunpy.run_path({COMMAND[1]!r}, run_name="__main__")\n'
    (tmp_path / "other.py").write_text(f"open({str(tmp_path / 'called.txt')!r}, 'a').write('x')\n{other}")
    plain = GRID.replace("set.run.total_steps = 4", FAST)
    # The second variant has the settings of the first: another program makes another run of them.
    text = plain.replace(
        'after = "GRPO"\nset.algorithm.loss.clip_ratio_high = 0.3', 'after = "GRPO"\nprogram = "other.py"'
    )
    result, runs = make(write_grid(text))
    assert len(result.records) == 4 and not result.failures
    assert (tmp_path / "called.txt").read_text() == "xx"
    assert len({run.settings for run in runs}) == 4
    assert [run.settings for run in runs][::2] == [run.settings for run in planned(write_grid(plain))[1]][::2]


def test_a_critic_that_fails_fails_once_for_all_its_runs(write_grid: WriteGrid) -> None:
    text = GRID.replace("set.run.total_steps = 4", f"{CRITIC}\nset.optimizer.learning_rate = 666.0").replace(
        "[[variants]]", "[[variants]]\npretrain_value = true"
    )
    result, _ = make(write_grid(text))
    assert len(result.failures) == 2 and not result.records


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_that_is_ended_leaves_no_run_behind_and_the_next_one_continues(
    number: signal.Signals, write_grid: WriteGrid
) -> None:
    path = write_grid(
        GRID.replace("set.run.total_steps = 4", "set.run.stopped_timeout_seconds = 0.1\nset.run.total_steps = 40")
    )
    program = (
        "from tests.unit.ablation.test_run_queue import make; from pathlib import Path\n"
        f"result, _ = make(Path({str(path)!r})); assert result.was_stopped and not result.failures"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    _, runs = planned(path)
    metrics = runs[0].directory / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait(timeout=120) == (0 if number == signal.SIGTERM else -number)
    # The run of a killed call had SIGTERM from the kernel, and ends after its step.
    steps = [0, metrics.read_text().count("\n")]
    while steps[-2] != steps[-1]:
        time.sleep(2.0)
        steps.append(metrics.read_text().count("\n"))
    assert steps[-1] < 40
    result, _ = make(path, Limits(max_runs=1))
    assert [record["train_step"] for record in result.records] == [list(range(1, 41))]


def test_threads_and_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert run_environment({}, 0, 1, 2, ())["OMP_NUM_THREADS"] == "8"
    assert run_environment({}, 0, 4, 2, ())["OMP_NUM_THREADS"] == "2"
    assert run_environment({"OMP_NUM_THREADS": "3"}, 0, 4, 2, ())["OMP_NUM_THREADS"] == "3"
    devices = ("0", "1", "4", "5")
    assert run_environment({}, 1, 2, 2, devices)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "CUDA_VISIBLE_DEVICES" not in run_environment({}, 0, 1, 2, devices)


def test_records_of_several_machines_meet_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "gathered" / RESULTS
    record = {"format": "megatron_dapo ablation 1", "commit": "a", "settings": "1", "seed": 1}
    for each in (record, {**record, "commit": "b"}, {**record, "seed": 7}):
        append_record(path, each)
    path.write_text(path.read_text() + json.dumps({"format": "another"}) + "\n[1]\n")
    assert [(each["commit"], each["seed"]) for each in read_records(path)] == [("a", 7), ("b", 1)]


def test_a_second_process_on_the_grid_is_refused(write_grid: WriteGrid, tmp_path: Path) -> None:
    from megatron_dapo.launch.lifetime import DirectoryLock

    lock = DirectoryLock(tmp_path / "runs")
    with pytest.raises(RuntimeError, match=f"in use by process {os.getpid()}"):
        ablate([write_grid()], [], ONE_NODE_OF_CPUS, Limits(max_runs=0), tell=print)
    lock.release()


def test_the_report_alone_says_what_is_missing(write_grid: WriteGrid, tmp_path: Path) -> None:
    said: list[str] = []
    assert ablate([write_grid()], [], ONE_NODE_OF_CPUS, Limits(max_runs=0), tell=said.append) == 75
    assert "0 on record, 4 left" in said[0]
    assert "Not on record yet: GRPO, seed 1; GRPO, seed 2" in (tmp_path / "runs" / "report.md").read_text()


# It shares "+ clip-higher" with GRID, under another name.
OTHER = 'name = "the other"\n' + GRID.replace('"+ clip-higher"', '"clip 0.3"').replace('"GRPO"', '"clip 0.5"').replace(
    "= 0.2", "= 0.5"
)


def test_grids_together_make_a_run_that_they_share_once(
    write_grid: WriteGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RunQueue", functools.partial(RunQueue, command=COMMAND))
    first = write_grid(GRID.replace("set.run.total_steps = 4", FAST))
    second = tmp_path / "other.toml"
    second.write_text(f'output_dir = "{tmp_path}/others"\n{OTHER.replace("set.run.total_steps = 4", FAST)}')
    said: list[str] = []
    results = tmp_path / "gathered"
    assert ablate([first, second], [], ONE_NODE_OF_CPUS, Limits(jobs=2), results, tell=said.append) == 0
    assert [line for line in said if "left" in line][:2] == [
        line for line in said if line.endswith("0 on record, 4 left")
    ]
    made = [path for place in ("runs", "others") for path in (tmp_path / place).glob("*/*/starts.txt")]
    assert len(made) == 6, made  # 8 less the two of the shared variant
    mine, others = (read_records(results / name / RESULTS) for name in ("grid", "other"))
    assert {(record["variant"], record["seed"]) for record in others} == {
        (name, seed) for name in ("clip 0.3", "clip 0.5") for seed in (1, 2)
    }
    assert {record["grid"] for record in others} == {"the other"} and len(mine) == 4
    shared = {record["settings"]: record for record in mine}
    for record in others:
        if record["variant"] == "clip 0.3":
            assert record["after"] == shared[record["settings"]]["after"]
            assert record["set"] == {"algorithm.loss.clip_ratio_high": 0.3}
    assert (results / "other" / "report.md").is_file() and (results / "grid" / "report.md").is_file()

    # What one has on record counts for the other, and is copied to it.
    (results / "other" / RESULTS).unlink()
    assert ablate([first, second], [], ONE_NODE_OF_CPUS, Limits(max_runs=0), results, tell=said.append) == 75
    assert len(read_records(results / "other" / RESULTS)) == 2
    with pytest.raises(ValueError, match=r"grid\.toml and .*grid\.toml write into one directory"):
        ablate([first, first], [], ONE_NODE_OF_CPUS, Limits(max_runs=0), results)
