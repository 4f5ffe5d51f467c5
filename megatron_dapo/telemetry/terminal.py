"""What a process writes to a terminal: log lines that do not cut through a live progress bar, and no warnings of libraries.

Only stderr itself decides whether it is a terminal. Notebooks and CI ask for colors (FORCE_COLOR) without being one, and
get plain lines.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TextIO

from rich.console import Console
from rich.text import Text

from megatron_dapo.untrusted import PrintableFormatter

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
    """Writes log records to stderr.

    On a terminal, rank 0 writes them through the console that draws its progress, which erases the bar first. Other
    processes erase the line that the bar is on; the bar's next refresh draws it again below theirs.
    """

    def __init__(self, rank: int = 0, stream: TextIO | None = None) -> None:
        super().__init__()
        self.console = terminal(stream)
        self._draws, self._rank = rank == 0, rank
        if not self.console.is_terminal:
            prefix = f"[rank {rank}] %(levelname)s %(name)s: "
        else:
            prefix = "" if rank == 0 else f"rank {rank}: "
        # Messages quote data files and answers of servers.
        self.setFormatter(PrintableFormatter(prefix + "%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            line = self.format(record)
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


def terminal(stream: TextIO | None = None) -> Console:
    """Return a console for stderr, which is a terminal only if the stream is one."""
    is_terminal = (stream or sys.stderr).isatty()
    return Console(file=stream, stderr=True, force_terminal=is_terminal, force_jupyter=False, highlight=False)


def logging_console() -> Console:
    """Return the console that log lines of this process go through."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, TerminalHandler)]
    return handlers[0].console if handlers else terminal()


def configure_logging(rank: int = 0, is_verbose: bool = False) -> None:
    """Send this process's log to stderr: of rank 0 from INFO on, of others warnings. `is_verbose`: DEBUG lines of rank 0
    too."""
    level = logging.INFO if rank == 0 else logging.WARNING
    logging.basicConfig(level=level, handlers=[TerminalHandler(rank)])
    if is_verbose and rank == 0:
        logging.getLogger("megatron_dapo").setLevel(logging.DEBUG)
    quiet_libraries()
