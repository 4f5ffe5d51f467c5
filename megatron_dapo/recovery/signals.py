"""SIGTERM and Ctrl-C: the current step finishes, a checkpoint is written, and the run exits."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets `requested`; the next one ends the process at once.

    Poll `requested` where a checkpoint can be written, and agree on it with the other ranks: a signal need not reach
    all of them. Enter it in the main thread.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        # From now on the default action, which works even while the process hangs in native code.
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        logger.warning("%s: saving and stopping after this step; once more to stop at once", self.signal_name)
