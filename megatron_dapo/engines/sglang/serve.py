"""A stock SGLang server whose API key comes from a file and whose processes end with the one that started it.

    python -m megatron_dapo.engines.sglang.serve --api-key-file FILE [any argument of SGLang's own server]

SGLang spawns its scheduler and detokenizer, and each of them imports this module again before it imports sglang: what
must hold in every process of the engine is done where the module is run, not where it is imported as a library.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.engines.sglang import cpu
from megatron_dapo.engines.sglang.keys import read_key

_PR_SET_PDEATHSIG = 1  # prctl(2)


def serve(arguments: Sequence[str]) -> None:
    """Serve until told to stop. `arguments` are SGLang's, preceded by --api-key-file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key-file", type=Path, required=True)
    ours, sglang_arguments = parser.parse_known_args(arguments)
    key = read_key(ours.api_key_file)
    _end_with_lifeline()
    cpu.apply_to_sglang()

    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree
    from sglang.srt.utils.auth import add_api_key_middleware

    # SGLang logs its arguments at the start and hands them to every child: the key is not among them. Its own
    # middleware gets it directly.
    add_api_key_middleware(app, api_key=key, admin_api_key=None)
    try:
        launch_server(prepare_server_args(list(sglang_arguments)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _end_with_lifeline() -> None:
    """Kill this process and its group as soon as nobody holds the other end of its standard input any more.

    The starter's end closes however the starter dies. PR_SET_PDEATHSIG alone would not do: the kernel sends it when the
    THREAD that started this process ends.
    """
    threading.Thread(target=_watch_lifeline, name="lifeline", daemon=True).start()


def _watch_lifeline() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    """In a spawned child: die when the server does, from the first moment on (SGLang asks for it after its imports)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__mp_main__":
    _end_with_parent()
    cpu.prepare_imports()
    cpu.apply_to_sglang()

if __name__ == "__main__":
    cpu.prepare_imports()
    serve(sys.argv[1:])
