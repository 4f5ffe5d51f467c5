"""The demo's page as a separate process, with Gradio from a directory of packages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_dapo.demo.space import write_demo


def run_page(run: Path, base: str, trained: str, packages: Path, port: int) -> int:
    """Serve the page on loopback until it is interrupted, and return its exit code. ValueError if Gradio is missing."""
    if not (packages / "gradio").is_dir():
        raise ValueError(
            f"{packages} has no gradio: run `make .venv-demo`, or pip install --no-deps --target {packages} -r "
            "requirements/demo-cpu-py311.txt"
        )
    with tempfile.TemporaryDirectory(prefix="demo-") as directory:
        program = write_demo(run, Path(directory), base, trained)
        # The page's own copy of the modules comes first: it runs here as it does in a Space.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([directory, str(packages.resolve())]),
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_SERVER_NAME": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        if port:
            environment["GRADIO_SERVER_PORT"] = str(port)
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
        )  # otherwise the page would outlive this process
        process = subprocess.Popen([sys.executable, str(program)], cwd=directory, env=environment)
        try:
            return process.wait()
        except KeyboardInterrupt:  # the page gets it as well
            return process.wait()
        finally:
            process.kill()
