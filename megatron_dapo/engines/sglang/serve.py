"""A stock SGLang server whose API key comes from a file and whose processes end with the one that started it.

    python -m megatron_dapo.engines.sglang.serve --api-key-file FILE --scratch DIRECTORY [arguments of SGLang's own server]

With --nnodes above 1 it is the part of a server on one of its nodes, and ends with the other parts (--lifeline-port).

With CUDA SGLang spawns its scheduler and detokenizer, and each of them imports this module again before it imports sglang: what
must hold in every process of the engine is done where the module is run, not where it is imported as a library. On a CPU they
are forked from the first process, which has imported everything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_dapo.engines.sglang import cpu, lifeline
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.processes import end_session, end_with_starter, leave_signals_to_starter
from megatron_dapo.files.linux import end_with_parent
from megatron_dapo.imports import heavy_imports
from megatron_dapo.parallel.store import restrict_stores


def serve(arguments: Sequence[str]) -> None:
    """Serve until told to stop. `arguments` are SGLang's and three of ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key-file", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--lifeline-port", type=int)
    ours, sglang_arguments = parser.parse_known_args(arguments)
    end_with_starter(ours.scratch)
    key = read_key(ours.api_key_file)
    if ours.lifeline_port is not None:
        _end_with_other_parts(sglang_arguments, ours.lifeline_port, key, ours.scratch)
    if cpu.is_needed():
        _fork_processes()
    with heavy_imports():
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


def _end_with_other_parts(sglang_arguments: Sequence[str], port: int, key: str, scratch: Path) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--host")
    parser.add_argument("--dist-init-addr")
    ours, _ = parser.parse_known_args(sglang_arguments)
    end = partial(end_session, scratch)
    if ours.node_rank == 0:
        lifeline.listen(ours.host, port, key, end)
    else:
        lifeline.connect(ours.dist_init_addr.rpartition(":")[0].strip("[]"), port, key, end)


def _fork_processes() -> None:
    """Let SGLang fork its processes, although it asks to spawn them: each would take some eight CPU seconds to import it
    again. Not for CUDA, which a forked process cannot use."""
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force)
    os.register_at_fork(after_in_child=_begin_process)


def _begin_process() -> None:
    """Prepare a process that SGLang has started."""
    end_with_parent()  # SGLang asks for the same, when it has spawned a process only after imports of many seconds
    restrict_stores()  # its ranks meet at the address that they are given: loopback, or the first node's


if __name__ == "__mp_main__":
    _begin_process()
    with heavy_imports():
        cpu.prepare_imports()
        cpu.apply_to_sglang()

if __name__ == "__main__":
    leave_signals_to_starter()
    cpu.prepare_imports()
    serve(sys.argv[1:])
