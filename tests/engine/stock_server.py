"""A stock SGLang server on a CPU as a user starts it, with its tokenizer and without a key: arguments are SGLang's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron_dapo.engines.sglang import cpu

if __name__ in ("__main__", "__mp_main__"):
    cpu.prepare_imports()
    cpu.apply_to_sglang()

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
