"""Log lines and progress on one terminal, plain lines elsewhere, and warnings that reach nobody."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator

import pytest

from megatron_dapo.telemetry.progress import LiveProgress, LogProgress, StepReport, progress_view
from megatron_dapo.telemetry.terminal import (
    TerminalHandler,
    end_status,
    quiet_libraries,
    show_status,
    status,
    terminal,
)

REPORT = StepReport(finished=2, accuracy=0.42, reward=0.1, tokens_per_s=3969.0, filtered_share=0.1, mismatch=1e-7)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Screen:
    """The part of a terminal that a progress bar needs: lines, cursor up, carriage return and erase line."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text: str) -> None:
        place = 0
        while place < len(text):
            each = text[place]
            if each == "\x1b":
                end = next(at for at in range(place + 2, len(text)) if text[at].isalpha())
                code, number = text[end], text[place + 2 : end]
                if code == "A":
                    self.row -= int(number or 1)
                elif code == "K":
                    self.lines[self.row] = self.lines[self.row][: self.column] if number != "2" else ""
                place = end + 1
                continue
            if each == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif each == "\r":
                self.column = 0
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + each + line[self.column + 1 :]
                self.column += 1
            place += 1


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("test_terminal")
    log.propagate, level = False, log.level
    log.setLevel(logging.INFO)
    yield log
    log.handlers.clear()
    log.propagate = True
    log.setLevel(level)


def test_log_lines_and_the_bar_never_share_a_line(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    handler, other = TerminalHandler(0, stream), TerminalHandler(1, stream)
    log.addHandler(handler)
    view = progress_view(6, 0.02, 0, handler.console)
    assert isinstance(view, LiveProgress)
    for number in range(3):
        view.phase("train")
        log.info("evaluation %d", number)
        view._progress.refresh()
    other.emit(logging.LogRecord("m", logging.WARNING, "", 0, "a slow disk", None, None))
    view._progress.refresh()
    view.step(REPORT)
    log.info("checkpoint of train step 2")
    view.close()
    screen = Screen()
    screen.write(stream.getvalue())
    lines = [line.strip() for line in screen.lines if line.strip()]
    assert lines == ["evaluation 0", "evaluation 1", "evaluation 2", "rank 1: a slow disk", "checkpoint of train step 2"]


def test_a_status_is_one_line_below_the_log_and_leaves_nothing(root: list[logging.Handler]) -> None:
    stream = Terminal()
    root.append(TerminalHandler(None, stream))
    log = logging.getLogger("megatron_dapo.test_terminal")
    with status("checking the data"):
        log.warning("two rows are equal")
        with status("reading the model"):  # a command inside another one
            log.warning("no chat template")
    shown = stream.getvalue()
    assert "checking the data" in shown and "reading the model" not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is back"
    screen = Screen()
    screen.write(shown)
    assert [line.strip() for line in screen.lines if line.strip()] == ["two rows are equal", "no chat template"]


def test_a_status_ends_when_progress_is_drawn(root: list[logging.Handler]) -> None:
    stream = Terminal()
    handler = TerminalHandler(0, stream)
    root.append(handler)
    show_status("loading the model")
    view = progress_view(6, 0.02)
    assert isinstance(view, LiveProgress)
    view.close()
    end_status()
    screen = Screen()
    screen.write(stream.getvalue())
    assert not "".join(screen.lines).strip() and "loading the model" in stream.getvalue()


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_pipe_has_no_status_and_other_ranks_have_none(root: list[logging.Handler], rank: int | None) -> None:
    stream = Terminal() if rank else io.StringIO()
    root.append(TerminalHandler(rank, stream))
    with status("checking the data"):
        show_status("checking the data")
    assert stream.getvalue() == ""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> list[logging.Handler]:
    """The handlers of the root logger, none at the begin."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    return logging.getLogger().handlers


@pytest.mark.parametrize("force", [False, True])
def test_a_pipe_gets_plain_lines_even_if_colors_are_forced(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    if force:
        monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    handler = TerminalHandler(0, stream)
    log.addHandler(handler)
    log.warning("a %s", "\x1b[31mred word")
    assert isinstance(progress_view(6, 0.02, 0, handler.console), LogProgress)
    assert stream.getvalue() == "[rank 0] WARNING test_terminal: a \\u001b[31mred word\n"


def test_a_terminal_is_one_by_itself() -> None:
    assert terminal(Terminal()).is_terminal and not terminal(io.StringIO()).is_terminal


@pytest.mark.parametrize(
    ("category", "module", "is_shown"),
    [
        (UserWarning, "megatron.core.optimizer.clip_grads", False),
        (UserWarning, "megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision", False),
        (FutureWarning, "torch.distributed.c10d_logger", False),
        (UserWarning, "my_reward", True),
        (FutureWarning, "pandas.core", True),
    ],
)
def test_only_warnings_of_these_libraries_are_left_out(category: type[Warning], module: str, is_shown: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_libraries()
        warnings.warn_explicit("it is deprecated", category, f"{module}.py", 1, module, registry={})
    assert bool(caught) == is_shown
