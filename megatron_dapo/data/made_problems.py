"""Problems made by reasoning-gym, as a source of prompts: `path = "reasoning_gym:chain_sum"` in [[data.sources]].

The package is optional and imports many others, so a separate process makes the problems and this one reads its output.
Its own verifier scores them: reward.verifier = "megatron_dapo.rewards.verifiers.reasoning_gym:reward".
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_dapo.untrusted import one_line

INSTALL = "make .venv-tasks, then start with PYTHONPATH=.venv-tasks (or pip install reasoning-gym)"
ENTRY = "reasoning_gym"  # the column of a row that its verifier reads
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class MadeProblems:
    """A reasoning-gym task and its problems for one epoch. Equal values make equal problems."""

    task: str
    size: int
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0

    def __str__(self) -> str:
        return f"reasoning_gym:{self.task}"

    def rows(self, count: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield question, answer and entry of the first `count` problems, by default all. ValueError, with the reason,
        if the package, the task or a setting is unknown."""
        wanted = self.size if count is None else min(count, self.size)
        spec = json.dumps({**asdict(self), "size": wanted, "seed": self._seed()})
        command = [sys.executable, "-m", __name__, spec]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{self}: {wanted:,} problems were not made in {_TIMEOUT_S:g} s; lower size") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit code {done.returncode}"
            if "No module named 'reasoning_gym'" in reason:
                raise ValueError(f"{self}: reasoning-gym is not installed: {INSTALL}")
            raise ValueError(f"{self} with settings {dict(self.settings)}: {one_line(reason)[:300]}")
        yield from map(json.loads, done.stdout.splitlines())

    def _seed(self) -> int:
        # reasoning-gym makes problem i from seed + i, so neighboring seeds would make nearly the same problems.
        digest = hashlib.sha256(f"{self.seed}/{self.epoch}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 2  # some tasks take 32 bits


def main(spec: str) -> None:
    """Write the problems of a JSON description, one object per line."""
    import reasoning_gym

    wanted = json.loads(spec)
    problems = reasoning_gym.create_dataset(
        wanted["task"], size=wanted["size"], seed=wanted["seed"], **wanted["settings"]
    )
    for index in range(wanted["size"]):
        entry = problems[index]
        answer = entry["answer"]
        row = {
            "question": entry["question"],
            "answer": "" if answer is None else str(answer),  # some tasks have many right answers and name none
            ENTRY: {"task": wanted["task"], "entry": json.dumps(entry, default=str)},
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
