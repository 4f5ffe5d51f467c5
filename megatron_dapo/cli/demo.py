"""`megatron-dapo demo`: its page as a separate process, with Gradio as installed or from a directory of packages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.options import refuse, refusing
from megatron_dapo.telemetry.terminal import status

BaseOption = Annotated[
    str, typer.Option(help="the model before training: directory or Hub repository; default: model.path")
]
TrainedOption = Annotated[str, typer.Option(help="the model after it; default: the run's exported one")]


def demo(
    run: Annotated[Path, typer.Argument(help="directory of a finished run")],
    base: BaseOption = "",
    trained: TrainedOption = "",
    packages: Annotated[Path, typer.Option(help="directory with Gradio (make .venv-demo), unless it is installed")] = Path(".venv-demo"),
    port: Annotated[int, typer.Option(min=0, help="on loopback; 0: any free one")] = 7860,
) -> None:
    """Open a page that asks the base and the trained model the same problem and shows the reward."""
    from megatron_dapo.demo.space import GRADIO_VERSION, write_demo

    with tempfile.TemporaryDirectory(prefix="demo-") as directory:
        with refusing(ValueError), status("reading the run"):
            program = write_demo(run, Path(directory), base, trained)
        paths = [directory, os.getcwd()]
        if (packages / "gradio").is_dir():
            paths.append(str(packages.resolve()))
        elif find_spec("gradio") is None:
            refuse(f"the page needs Gradio: pip install gradio=={GRADIO_VERSION}, or name a directory that has it by --packages")
        # The page's own copy of the modules comes first: it runs here as it does in a Space.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_SERVER_NAME": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        if port:
            environment["GRADIO_SERVER_PORT"] = str(port)
        # Otherwise the page would outlive this process.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if sys.stderr.isatty():
            typer.echo("starting the page, which loads both models first", err=True)
        process = subprocess.Popen([sys.executable, str(program)], cwd=directory, env=environment)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the page gets it as well
            code = process.wait()
        finally:
            process.kill()
    raise typer.Exit(code)
