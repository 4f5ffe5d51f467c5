"""Resumed runs have every step once; a failing writer does not stop training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dapo.files.durable import HERE
from megatron_dapo.telemetry.writers import JsonlWriter, MetricRecorder, TensorBoardWriter


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_resume_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlWriter(path, first_step=1, files=HERE)
    for step in range(1, 6):
        first.write(step, {"loss": 1.0 / step})
    first.close()
    path.write_text(path.read_text() + '{"train_step": 2, "lo')  # killed while writing
    second = JsonlWriter(path, first_step=4, files=HERE)
    second.write(4, {"loss": float("nan")})
    second.close()
    assert [(row["train_step"], row["loss"]) for row in lines(path)] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, None)]


def test_jsonl_of_another_run_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train_step": 1}\nnot json\n[1]\n')
    JsonlWriter(path, first_step=1, files=HERE).close()
    assert path.read_text() == ""


def test_a_line_is_on_disk_immediately(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "deep" / "m.jsonl", first_step=1, files=HERE)
    writer.write(1, {"a": 1.0})
    assert lines(tmp_path / "deep" / "m.jsonl") == [{"train_step": 1, "a": 1.0}]
    writer.close()


def test_tensorboard_resume_has_every_step_once(tmp_path: Path) -> None:
    for first, steps in ((1, range(1, 6)), (4, range(4, 7))):
        writer = TensorBoardWriter(tmp_path, first_step=first, files=HERE)
        for step in steps:
            writer.write(step, {"actor/loss": float(first * 100 + step)})
        assert list(tmp_path.glob("events.*"))
        writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/loss")] == [
        (1, 101.0),
        (2, 102.0),
        (3, 103.0),
        (4, 404.0),
        (5, 405.0),
        (6, 406.0),
    ]


def test_a_failing_writer_is_counted_and_the_others_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, train_step: int, values: object) -> None:
            raise OSError("No space left on device")

        def close(self) -> None:
            raise OSError("No space left on device")

    path = tmp_path / "m.jsonl"
    recorder = MetricRecorder([Full(), JsonlWriter(path, first_step=1, files=HERE)])
    recorder.write(1, {"a": 1.0})
    recorder.write(2, {"a": 2.0})
    recorder.close()
    assert len(lines(path)) == 2 and recorder.num_failures == 3
    assert caplog.text.count("No space left") == 1


def test_tensorboard_has_no_constant_series(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, first_step=1, files=HERE)
    late = {1: 0.0, 2: 0.0, 3: 0.0, 4: 7.0, 5: 7.0}
    for step, value in late.items():
        writer.write(step, {"critic/loss": 0.0, "mismatch/ess": 1.0, "late": value, "nan": float("nan")})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["late"]
    # The steps between equal ones are left out: the line is the same.
    assert [(event.step, event.value) for event in events.Scalars("late")] == [(1, 0.0), (3, 0.0), (4, 7.0), (5, 7.0)]
    assert events.Scalars("late")[0].wall_time <= events.Scalars("late")[1].wall_time


def test_tensorboard_has_hyper_parameters_and_texts(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    settings = {"optimizer.learning_rate": 1e-6, "run.name": "x", "run.deterministic": True}
    writer = TensorBoardWriter(tmp_path, 1, HERE, settings)
    writer.write_texts(10, {"samples/correct": "    <b>2 + 5 = 7</b>"})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (content,) = events.PluginTagToContent("hparams").values()
    started = metadata.parse_session_start_info_plugin_data(content)
    assert {
        name: value.number_value or value.string_value or value.bool_value for name, value in started.hparams.items()
    } == settings
    (text,) = events.Tensors("samples/correct")
    assert text.step == 10 and text.tensor_proto.string_val[0] == b"    <b>2 + 5 = 7</b>"
