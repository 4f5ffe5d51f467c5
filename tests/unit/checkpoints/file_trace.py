"""Files of the package whose functions run. As a program: `file_trace.py OUTPUT MODULE [ARGUMENT ...]` traces a module's main."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
import threading
from pathlib import Path
from types import FrameType

_FUNCTION = inspect.CO_OPTIMIZED  # bodies of modules and classes, which run when they are imported, do not have it


class FileTrace:
    """A profile function that notes files in the order of their first call.

    `after`: a function from whose first call on files count.
    """

    def __init__(self, after: str = "") -> None:
        self.files: dict[str, None] = {}
        self._after = after

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename.rpartition("/megatron_dapo/")
        if self._after == frame.f_code.co_name and path[1]:
            self._after = ""
        if self._after:
            return
        if event == "call" and path[1] and frame.f_code.co_flags & _FUNCTION and not _is_importing(frame):
            self.files.setdefault(path[2])


def _is_importing(frame: FrameType) -> bool:
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals.get("__name__", "").startswith("megatron_dapo"):
            return True
        caller = caller.f_back
    return False


def main() -> None:
    """Run a module as `python -m` does and write the files that it passed."""
    output, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    trace = FileTrace(after="do")  # the first request
    threading.setprofile(trace)
    sys.setprofile(trace)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.setprofile(None)
    Path(output).write_text(json.dumps(list(trace.files)), encoding="utf-8")


if __name__ == "__main__":
    main()
