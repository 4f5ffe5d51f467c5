"""What a process writes to a terminal: log lines that do not cut through a live progress bar, and no warnings of libraries.

Only stderr itself decides whether it is a terminal. Notebooks and CI ask for colors (FORCE_COLOR) without being one, and
get plain lines.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from megatron_dapo.untrusted import PrintableFormatter

if TYPE_CHECKING:
    from rich.status import Status

_ERASE_LINE = "\r\x1b[2K"
_LIBRARIES = ("megatron", "transformers", "torch", "httpx")


def quiet_libraries() -> None:
    """Leave out what libraries warn about and a user cannot change: packages that they could use too, and functions of
    torch that megatron-core calls by their old names. `doctor` says which of the packages are in use."""
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core|torch\.autograd")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core|torch\.distributed")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")


class TerminalHandler(logging.Handler):
    """Writes log records to stderr. `rank`: of a run; None: the command itself writes.

    On a terminal, rank 0 writes them through the console that draws its progress, which erases the bar first. Other
    processes erase the line that the bar is on; the bar's next refresh draws it again below theirs.
    """

    def __init__(self, rank: int | None = None, stream: TextIO | None = None) -> None:
        super().__init__()
        self.console = terminal(stream)
        self._draws = not rank
        self.mark = ""  # begins each line
        self._status: Status | None = None
        if not self.console.is_terminal:
            prefix = f"{'' if rank is None else f'[rank {rank}] '}%(levelname)s %(name)s: "
        else:
            prefix = f"rank {rank}: " if rank else ""
        # Messages quote data files and answers of servers.
        self.setFormatter(PrintableFormatter(prefix + "%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            line = self.mark + self.format(record)
            if not self.console.is_terminal:
                self.console.file.write(line + "\n")
                self.console.file.flush()
            elif self._draws:
                style = "yellow" if record.levelno >= logging.WARNING else ""
                self.console.print(Text(line, style), soft_wrap=True)
            else:
                self.console.file.write(f"{_ERASE_LINE}{line}\n")
                self.console.file.flush()
        except Exception:
            self.handleError(record)

    def show(self, text: str) -> None:
        """Show what this process is doing in the last line of a terminal until `hide`; nothing elsewhere."""
        if self._draws and self._status is None and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._status = self.console.status(Text(text))
            self._status.start()

    def hide(self) -> None:
        """Remove the line of `show`."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show what a command is doing in the last line of a terminal while the body runs; nothing elsewhere.

    The body must not write to the terminal but by log lines. Inside another `status` it changes nothing.
    """
    handler = _handler()
    shows = handler is not None and handler._status is None
    if handler is not None:
        handler.show(text)
    try:
        yield
    finally:
        if handler is not None and shows:
            handler.hide()


def show_status(text: str) -> None:
    """Show what this process is doing until `end_status`, on a terminal."""
    if (handler := _handler()) is not None:
        handler.show(text)


def end_status() -> None:
    """Remove the line of `show_status`: before another one is drawn, and before this process ends."""
    if (handler := _handler()) is not None:
        handler.hide()


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Begin the log lines of this process with a name inside."""
    handler = _handler()
    if handler is not None:
        handler.mark = f"{name}: "
    try:
        yield
    finally:
        if handler is not None:
            handler.mark = ""


def _handler() -> TerminalHandler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, TerminalHandler)), None)


def terminal(stream: TextIO | None = None) -> Console:
    """Return a console for stderr, which is a terminal only if the stream is one."""
    is_terminal = (stream or sys.stderr).isatty()
    return Console(file=stream, stderr=True, force_terminal=is_terminal, force_jupyter=False, highlight=False)


def logging_console() -> Console:
    """Return the console that log lines of this process go through."""
    handler = _handler()
    return handler.console if handler else terminal()


def configure_logging(rank: int | None = None, is_verbose: bool = False) -> None:
    """Send this process's log to stderr: of a command and of rank 0 from INFO on, of other ranks warnings. `is_verbose`:
    DEBUG lines of rank 0 too."""
    logging.basicConfig(level=logging.WARNING if rank else logging.INFO, handlers=[TerminalHandler(rank)])
    if is_verbose and not rank:
        logging.getLogger("megatron_dapo").setLevel(logging.DEBUG)
    quiet_libraries()
