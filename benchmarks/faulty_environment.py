"""The environment of `episode_chaos.py`: each episode may meet one fault, in one of its steps and only once. Workers load it."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import stat
import time
from pathlib import Path

from megatron_dapo.environments import Environment, Lost, Step

TURNS = 8
# Share of the episodes that meet a fault. "late" answers after the step's deadline and before it is killed, or after both.
SHARES = {"exit": 0.05, "hang": 0.02, "kill": 0.02, "late": 0.02, "raise": 0.02, "garbage": 0.01, "memory": 0.005}


def fault_of(seed: int) -> tuple[str, int]:
    """Return the fault of an episode, "" for none, and its step; 0 is `reset`."""
    rng = random.Random(f"{seed} fault")
    (name,) = rng.choices(["", *SHARES], [1 - sum(SHARES.values()), *SHARES.values()])
    return name, rng.randrange(TURNS + 1)


def answers(seed: int) -> list[str]:
    """Return what the environment of a seed says after each turn but the last."""
    rng = random.Random(seed)
    return [f"Answer {number}: {rng.randrange(10**6)}." for number in range(1, TURNS)]


def _write_into_pipes() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            mode, flags = os.fstat(int(name)).st_mode, fcntl.fcntl(int(name), fcntl.F_GETFL)
            if stat.S_ISFIFO(mode) and flags & os.O_ACCMODE == os.O_WRONLY:
                os.write(int(name), b"garbage\n")
        except OSError:  # another thread has closed it
            continue


class Faulty(Environment):
    """Eight turns, each of which is worth half a point."""

    def reset(self, task, seed):
        if task["is_broken"]:
            raise Lost("this task has no environment")
        self._answers, self._number = answers(seed), 0
        self._maybe_fail()
        (task.directory / "file").write_text("x" * 1000)
        return "Begin."

    def step(self, turn):
        self._number += 1
        self._maybe_fail()
        if self._number == TURNS:
            return Step(done=True, reward=0.5)
        return Step(self._answers[self._number - 1], reward=0.5)

    def _maybe_fail(self):
        fault, number = fault_of(self.task.seed)
        if not fault or number != self._number:
            return
        try:
            (Path(self.task["marks"]) / f"{self.task.seed}.{fault}").touch(exist_ok=False)
        except FileExistsError:
            return
        if fault == "exit":
            os._exit(3)
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "late":
            time.sleep(self.task["step_seconds"] + random.Random(self.task.seed).uniform(0.0, 2.0))
        elif fault == "raise":
            raise RuntimeError("on purpose")
        elif fault == "garbage":
            _write_into_pipes()
        else:
            bytearray(2**40)
