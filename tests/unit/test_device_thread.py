"""Threads run on the device of the thread that made them."""

from __future__ import annotations

import subprocess
import sys

import torch

from megatron_dapo.device_thread import device_thread, device_thread_pool


def test_threads_run_on_the_callers_device(gpu_3: None) -> None:
    seen: list[tuple[str, int]] = []
    thread = device_thread(lambda name: seen.append((name, torch.cuda.current_device())), "thread", name="thread")
    thread.start()
    thread.join(10)
    with device_thread_pool(2, "pool") as pool:
        assert [pool.submit(torch.cuda.current_device).result(10) for _ in range(4)] == [3] * 4
    assert seen == [("thread", 3)] and thread.daemon


def test_a_process_without_torch_stays_without_it() -> None:
    code = (
        "import sys; from megatron_dapo.device_thread import device_thread; "
        "t = device_thread(print, 'ran', name='t'); t.start(); t.join(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "ran\n"
