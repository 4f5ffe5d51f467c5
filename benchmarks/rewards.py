"""Throughput of rewards, and what programs and answers that are made to hang and to get out achieve.

    python benchmarks/rewards.py [--json] [--tiny] [--concurrency 256] [--answers 2048] [--seconds 1.0] [--workers 1]

`judge_concurrency_efficiency`: answers per second of a user's `async def` that waits a second, over concurrency / seconds, the most
that so many waits at a time allow. `function_per_s`: answers of a function that compares two texts, for what the pool itself costs.
`code_per_s`: responses of the preset `code` with a program and ten tests each.

`hostile_hangs`, `hostile_escapes`: of the programs and answers in benchmarks/hostile.py. A hang has no score three seconds after its
deadline. An escape read a secret, wrote outside of its directory, reached a socket, exceeded a limit of memory, processes, files or
disk, or left a process behind. Started by root, all of it runs as root (whose programs are uid 65534) and as an ordinary user.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hostile
import options

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool.pool import VerifierPool
from megatron_dapo.rewards.sandbox import kernel
from megatron_dapo.workers.supervisor import descendants

GRACE_S = 3.0  # a busy machine kills late
DEADLINE_S = 5.0  # limit of a response: its program has two seconds by the clock
FUNCTIONS = """
import asyncio, os

async def judge(sample):
    await asyncio.sleep(float(os.environ["JUDGE_SECONDS"]))
    return sample.response == sample.answer

def compare(sample):
    return sample.response == sample.answer
"""
FIELDS = {
    "messages": [{"role": "user", "content": "How many?"}],
    "data_source": "",
    "extra_info": {"tests": "assert f(1) == 2\n" * 8},
    "finish_reason": "stop",
    "group_index": 0,
}


def measure(concurrency: int, answers: int, seconds: float, workers: int) -> dict[str, Any]:
    """Return the figures of `answers` responses of 20,000 characters; half of them are right."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "functions.py"
        path.write_text(FUNCTIONS)
        judged = _answers_per_second(f"{path}:judge", concurrency, answers, workers)
        compared = _answers_per_second(f"{path}:compare", concurrency, answers, workers)
    return {
        "judge_per_s": judged,
        "judge_concurrency_efficiency": judged * seconds / (concurrency * workers),
        "function_per_s": compared,
        "concurrency": concurrency,
        "answers": answers,
        "seconds": seconds,
        "workers": workers,
    }


def _answers_per_second(verifier: str, concurrency: int, answers: int, workers: int) -> float:
    texts = ["word " * 4000 + str(number % 2) for number in range(answers)]
    items = [(number, text, texts[0], False, FIELDS) for number, text in enumerate(texts)]
    with VerifierPool(
        verifier,
        RewardConfig(
            num_workers=workers, timeout_seconds=60.0, concurrency=concurrency, environment=("JUDGE_SECONDS",)
        ),
    ) as pool:
        pool.score_many(items[:1])  # every process has begun
        start = time.perf_counter()
        scores = pool.score_many(items)
        taken = time.perf_counter() - start
    assert sum(score.accuracy for score in scores.values()) == -(-answers // 2), "each second response is right"
    return answers / taken


# ---- programs


def code_per_second(responses: int) -> float:
    """Return the responses a second of one worker: a program, ten tests of standard input, half of them right."""
    tests = json.dumps({"inputs": [f"{n}\n" for n in range(10)], "outputs": [f"{2 * n}\n" for n in range(10)]})
    texts = [f"```python\nn = int(input())\nprint({2 - number % 2} * n)\n```" for number in range(responses)]
    items = [(number, text, tests, False, FIELDS) for number, text in enumerate(texts)]
    own = {"seconds_per_test": 10.0, "score": "share"}
    with VerifierPool("code", RewardConfig(timeout_seconds=120.0, code=own)) as pool:
        pool.score_many(items[:1])
        start = time.perf_counter()
        scores = pool.score_many(items)
        taken = time.perf_counter() - start
    assert sum(score.accuracy for score in scores.values()) == -(-responses // 2), scores[0]
    return responses / taken


# ---- hostile programs and answers


class World:
    """A secret, a directory, sockets and a process that programs must not reach, and a check of whether they have."""

    def __init__(self, directory: Path) -> None:
        self.secret, self.outside = f"secret-{secrets.token_hex(8)}", directory / "outside"
        self.outside.mkdir()
        (directory / "secret").write_text(self.secret)
        self.arrived: list[str] = []
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        datagrams, abstract = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
        datagrams.bind(("127.0.0.1", port))
        abstract.bind("\0" + directory.name)
        abstract.listen()
        for one, wait in ((server, server.accept), (datagrams, lambda: datagrams.recv(9)), (abstract, abstract.accept)):
            threading.Thread(target=self._watch, args=(one, wait), daemon=True).start()
        names = {"SECRET_FILE": directory / "secret", "OUTSIDE": self.outside, "PORT": port, "ABSTRACT": directory.name}
        self._names = {**names, "PARENT": os.getpid(), "SLEEP": hostile.SLEEP}

    def _watch(self, one: socket.socket, wait: Any) -> None:
        while True:
            wait()
            self.arrived.append(str(one.family))

    def filled(self, program: str) -> str:
        """Return a program with values for its names in capitals."""
        for name, value in self._names.items():
            program = program.replace(name, str(value))
        return program

    def escapes(self, text: str) -> list[str]:
        """Return what a program with this output has achieved, and clear it away."""
        found = ["said so"] if "ESCAPED" in text or self.secret in text else []
        if self.arrived:
            found.append(f"reached {self.arrived}")
            self.arrived.clear()
        places = [self.outside, *map(Path, ("/", "/usr", "/var/tmp", "/dev", "/root", "/tmp"))]
        for path in [place / "hostile-file" for place in places if os.access(place, os.X_OK)]:
            if path.exists():
                found.append(f"wrote {path}")
                path.unlink()
        if left := survivors():
            found.append(f"left processes {left}")
        return found


def survivors() -> list[int]:
    """Return processes that programs have left, after a second in which they may end."""
    end = time.monotonic() + 1.0
    while (found := _survivors()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def _survivors() -> list[int]:
    own = {str(pid) for pid in descendants(os.getpid())}
    runners, found = [], []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "Z":
            continue
        if words[-2:-1] == [hostile.SLEEP]:
            found.append(int(entry))
        # Of each worker only the process that waits for the next job is left.
        elif len(words) > 3 and words[2].endswith("sandbox/runner.py") and words[3] in own:
            runners.append(int(entry))
    return found + runners[1:]


@contextmanager
def hostile_pool(directory: Path) -> Iterator[tuple[VerifierPool, World]]:
    """Yield a pool of the preset `code` whose process has a secret in its environment, and the world around it."""
    world = World(directory)
    os.environ["HOSTILE_SECRET_KEY"] = world.secret
    with VerifierPool(
        "code", RewardConfig(timeout_seconds=DEADLINE_S, code=hostile.LIMITS, environment=("HOSTILE_SECRET_KEY",))
    ) as pool:
        yield pool, world


def measure_hostile(every: int) -> dict[str, Any]:
    """Return counts over every n-th program and answer, with the names of those that did what they must not."""
    hangs: list[str] = []
    escapes: list[str] = []
    programs = dict(list(hostile.programs().items())[::every])
    answers = dict(list(hostile.answers().items())[::every])
    with tempfile.TemporaryDirectory(prefix="rewards-hostile-") as name:
        with hostile_pool(Path(name)) as (pool, world):
            isolation = pool.version
            for title, program in programs.items():
                pool.score_many(
                    [("ready", "", json.dumps(TESTS), False, FIELDS)]
                )  # a process that was replaced starts outside of the time
                item = (title, f"```python\n{world.filled(program)}\n```", json.dumps(TESTS), False, FIELDS)
                start = time.monotonic()
                score = pool.score_many([item])[title]
                if time.monotonic() - start > DEADLINE_S + GRACE_S:
                    hangs.append(title)
                found = world.escapes(json.dumps(score.detail))
                # The sandbox answers for every program, if late on a busy machine: else one has ended its verifier process.
                if found or score.outcome == "error":
                    found.append(score.outcome)
                    escapes.append(f"{title}: {', '.join(found)}: {score.detail}")
    for verifier in ("dapo", "lenient"):
        with VerifierPool(verifier, RewardConfig(timeout_seconds=DEADLINE_S)) as pool:
            for title, response in answers.items():
                pool.score_many([("ready", "Answer: 1", "42", False)])
                start = time.monotonic()
                score = pool.score_many([(title, response, "42", False)])[title]
                if time.monotonic() - start > DEADLINE_S + GRACE_S:
                    hangs.append(f"{verifier}: {title}")
                if score.outcome == "correct" and "42" not in response:
                    escapes.append(f"{verifier}: {title} is correct")
    return {
        "user": os.getuid(),
        "isolation": isolation,
        "programs": len(programs),
        "answers": len(answers),
        "hangs": hangs,
        "escapes": escapes,
    }


TESTS = {"inputs": [""], "outputs": ["no program prints this"]}


def measure_as_ordinary_user(every: int) -> dict[str, Any]:
    """Return `measure_hostile` of a process of uid 65534. Needs root.

    Directories above the interpreter that only root may enter (/root, say) are replaced by ones that have only the
    interpreter, in a mount namespace of that process's own.
    """

    def become_ordinary() -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        _open_directories([os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, os.getcwd())])
        kernel.become(kernel.UNPRIVILEGED)

    command = [sys.executable, "-B", __file__, "--hostile-only", str(every)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HOME": "/nonexistent",
        "TMPDIR": "/tmp",
    }
    done = subprocess.run(
        command, check=False, preexec_fn=become_ordinary, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"as an ordinary user: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def _open_directories(paths: list[str]) -> None:
    """Let every user enter the directories above `paths`, in this mount namespace."""
    kernel.make_mounts_private()
    for path in paths:
        above = ["/" + "/".join(path.split("/")[1:depth]) for depth in range(2, path.count("/") + 1)]
        closed = next((one for one in above if not os.stat(one).st_mode & 1), None)
        if closed:
            descriptor = os.open(path, os.O_PATH)
            kernel.mount("tmpfs", closed, "tmpfs", 0, "mode=755")
            os.makedirs(path, mode=0o755)
            kernel.bind(f"/proc/self/fd/{descriptor}", path)


def main() -> None:
    parser = options.parser(__doc__, "some seconds: every ninth hostile program and answer")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--answers", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each verdict takes")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--hostile-only", type=int, default=0, metavar="EVERY", help="every n-th hostile one, as this user"
    )
    arguments = parser.parse_args()
    if arguments.hostile_only:
        print(json.dumps(measure_hostile(arguments.hostile_only)))
        return
    every, responses = 1, 200
    if arguments.tiny:
        arguments.concurrency, arguments.answers, arguments.seconds = 16, 64, 0.25
        every, responses = 9, 10
    os.environ["JUDGE_SECONDS"] = str(arguments.seconds)
    found = measure(arguments.concurrency, arguments.answers, arguments.seconds, arguments.workers)
    found["code_per_s"] = code_per_second(responses)
    hostile_runs = [measure_hostile(every)]
    if os.getuid() == 0:
        hostile_runs.append(measure_as_ordinary_user(every))
    found |= {
        "hostile_hangs": sum(len(run["hangs"]) for run in hostile_runs),
        "hostile_escapes": sum(len(run["escapes"]) for run in hostile_runs),
        "hostile_programs": hostile_runs[0]["programs"],
        "hostile_answers": hostile_runs[0]["answers"],
        "hostile": hostile_runs,
    }
    options.show(found, arguments)


if __name__ == "__main__":
    main()
