"""Environments as users write them, and one that misbehaves on command; worker processes load this file."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import time

from megatron_dapo.environments import Environment, Lost, Reward, Step, ToolEnvironment, tool, user

NO_CLASS = 1


class Guess(Environment):
    """Guess a number of 1 to 31."""

    def reset(self, task, seed):
        print("noise on standard output " * 1000)
        sys.stdin.read()
        os.system("echo noise of a child")
        self.number = task.random.randint(1, 31)
        return "Guess a number of 1 to 31."

    def step(self, turn):
        guess = int(turn.text)
        if guess == self.number:
            return Step(done=True, reward=1.0, correct=True, parts={"found": 1.0})
        return Step("higher" if guess < self.number else "lower", reward=-0.02)


class Calculator(ToolEnvironment):
    """Answer with the value of the task's expression."""

    @tool
    def calculate(self, expression: str) -> str:
        """Compute the value of an arithmetic expression.

        Args:
            expression: digits, + - * / ( )
        """
        return str(eval(expression, {"sleep": time.sleep}))

    @tool
    async def wait(self, seconds: float = 0.0) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    async def finish(self, turn):
        return Reward(float(turn.text == self.task["answer"]), correct=turn.text == self.task["answer"])


async def chat_twice(task, client):
    messages = task.messages
    turn = await client.chat(messages)
    client.reward(0.25)
    messages += [turn.message, user(f"You said {turn.text}.")]
    turn = await client.chat(messages)
    return turn.text == task["answer"]


async def delegate(task, client):
    """Two forks and a sub-agent at a time; the process is told the end of the episode in the middle of them."""
    first = await client.chat(task.messages)
    task.record(words=len(first.text.split()))
    messages = [*task.messages, first.message, user("more")]
    chats = [client.fork().chat(messages), client.chat(messages), client.fresh("a search").chat([user("find it")])]
    turns = await asyncio.gather(*chats)
    task.record(agreed=turns[0].text == turns[1].text)
    return 1.0


def rewrite_history(task, client):
    turn = client.chat([user("one")])
    client.chat([user("another"), turn.message, user("two")])


class Unrepeatable(Environment):
    def reset(self, task, seed):
        return f"begin {random.random()}"

    def step(self, turn):
        return Step("more")


class RaisesInReset(Environment):
    def reset(self, task, seed):
        raise OSError("no data base")


class Misbehaving(Environment):
    """Three steps, of which `task["at"]` does what `task["fault"]` says."""

    def reset(self, task, seed):
        self.num_steps = 0
        (task.directory / "file").write_text("x" * 1000)
        self._maybe(0)
        return f"begin {task.random.random()}"

    def step(self, turn):
        self.num_steps += 1
        self._maybe(self.num_steps)
        if self.num_steps == 3:
            return Step(done=True, reward=1.0, correct=True)
        return Step(f"{turn.text} {self.num_steps} {self.task.random.random()}")

    def _maybe(self, step):
        if self.task.get("at") == step and self.task.get("fault"):
            FAULTS[self.task["fault"]]()


class Restorable(Misbehaving):
    """A `Misbehaving` with a state."""

    def get_state(self):
        return {"num_steps": self.num_steps}

    def set_state(self, state):
        self.num_steps = state["num_steps"]


def _fork_daemon(loop="time.sleep(600)"):
    """Leave a process in a session of its own, forked twice, that ignores SIGTERM and holds no pipe."""
    code = f"import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.setsid()\nif os.fork(): os._exit(0)\n{loop}"
    subprocess.Popen([sys.executable, "-S", "-c", code], close_fds=True)


def _raise():
    raise RuntimeError("on purpose")


def _say_lost():
    raise Lost("the data base is down")


def _write_into_pipes():
    for name in os.listdir("/proc/self/fd"):
        try:
            mode, flags = os.fstat(int(name)).st_mode, fcntl.fcntl(int(name), fcntl.F_GETFL)
            if stat.S_ISFIFO(mode) and flags & os.O_ACCMODE == os.O_WRONLY:
                os.write(int(name), b"garbage\n")
        except OSError:
            pass


def _hang_with_daemon():
    _fork_daemon()
    time.sleep(600)


_HOARD = []


def _grow_in_children():
    """Take more memory in several processes than one may have, with less in each."""
    for _ in range(3):
        subprocess.Popen([sys.executable, "-S", "-c", "import time; x = b'x' * (200 * 2**20); time.sleep(600)"], close_fds=True)
    time.sleep(600)


def _stop_everything():
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # another thread may be the first to stop


FAULTS = {
    "raise": _raise,
    "lost": _say_lost,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(600),
    "grow": lambda: _HOARD.append(b"x" * (60 * 2**20)),
    "children": _grow_in_children,
    "slow": lambda: time.sleep(2.0),
    "daemon": _hang_with_daemon,
    "stop": _stop_everything,
    "fill": lambda: [print("x" * 10_000) for _ in range(100_000)] and time.sleep(600),
    "garbage": _write_into_pipes,
    "memory": lambda: bytearray(2**40),
    "close": lambda: (os.closerange(3, 100), time.sleep(600)),
    "leave": _fork_daemon,
}
