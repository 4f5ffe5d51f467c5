"""Reward functions that misbehave on command, loaded by verifier processes as a user's module."""

from __future__ import annotations

import os
import re
import signal
import sys
import time


def by_command(response: str, answer: str):
    command, _, argument = response.partition(" ")
    return COMMANDS[command](argument, answer)


def _say(argument, answer):
    print("noise on standard output " * 10_000)
    sys.stdin.read()
    return argument == answer


def _sleep(argument, answer):
    time.sleep(float(argument))
    return True


def _spin(argument, answer):
    while True:
        pass


def _hog(argument, answer):
    return len(bytearray(8 * 2**30)) > 0


def _hog_slowly(argument, answer):
    pieces = []
    while True:
        pieces.append(bytearray(2**20))


def _grow_tower(argument, answer):
    return 9**9**9**9 > 0  # never comes back from C, so no signal handler of Python's ever runs


def _catastrophe(argument, answer):
    return re.fullmatch(r"(a+)+b", "a" * 64) is not None


def _ignore_signals(argument, answer):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def _leave_child(argument, answer):
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)


def _daemon(argument, answer):
    """Leave a process that belongs to no group or session of this one and sleeps; spin, or answer at once."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(20):
                try:
                    os.close(descriptor)
                except OSError:
                    pass
            time.sleep(600)
        os._exit(0)
    while argument == "spin":
        pass
    return True


def _bomb(argument, answer):
    """Every process there is doubles, twenty times a second."""
    while True:
        if os.fork() == 0:
            os.setsid()
        time.sleep(0.05)


def _big_file(argument, answer):
    with open(argument, "wb") as stream:
        for _ in range(10 * 2**10):
            stream.write(bytes(2**20))  # 10 GB in all


def _stop_parent(argument, answer):
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)


def _fork(argument, answer):
    """Both processes return from here."""
    os.fork()
    return argument == answer


def _environment(argument, answer):
    return {"accuracy": 1, "detail": dict(os.environ)}


def _forge(argument, answer):
    """Write replies to every descriptor that looks like the protocol's."""
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b'{"id": -1, "outcome": "correct"}\n')
        except OSError:
            pass
    time.sleep(600)


def _raise(argument, answer):
    raise KeyError(argument)


COMMANDS = {
    "say": _say,
    "sleep": _sleep,
    "spin": _spin,
    "hog": _hog,
    "hog_slowly": _hog_slowly,
    "tower": _grow_tower,
    "catastrophe": _catastrophe,
    "ignore_signals": _ignore_signals,
    "leave_child": _leave_child,
    "daemon": _daemon,
    "bomb": _bomb,
    "big_file": _big_file,
    "stop_parent": _stop_parent,
    "fork": _fork,
    "environment": _environment,
    "forge": _forge,
    "raise": _raise,
    "sys_exit": lambda argument, answer: sys.exit(3),
    "os_exit": lambda argument, answer: os._exit(int(argument or 0)),
    "kill": lambda argument, answer: os.kill(os.getpid(), signal.SIGSEGV),
    "sigkill": lambda argument, answer: os.kill(os.getpid(), signal.SIGKILL),
    "recurse": lambda argument, answer: COMMANDS["recurse"](argument, answer),
    "reward": lambda argument, answer: float(argument),
    "nan": lambda argument, answer: float("nan"),
}
