"""`megatron-dapo export`: the model of a checkpoint or of a run as a directory, and as a repository on the Hugging Face Hub."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_dapo.checkpoints.disk_space import size
from megatron_dapo.cli.demo import BaseOption, TrainedOption
from megatron_dapo.cli.options import refuse, refusing
from megatron_dapo.data.hub_upload import own_repository, upload
from megatron_dapo.telemetry.terminal import status


def export(
    source: Annotated[
        Path, typer.Argument(help="a checkpoint, e.g. runs/x/checkpoints/step_000012; a finished run with --space or --push")
    ],
    target: Annotated[Path | None, typer.Argument(help="Hugging Face directory to write, of a checkpoint")] = None,
    critic: Annotated[bool, typer.Option("--critic", help="the critic of the checkpoint")] = False,
    model: Annotated[
        Path | None, typer.Option(help="directory the checkpoint's run started from; default: as its config.json says")
    ] = None,
    verify: Annotated[bool, typer.Option(help="check every byte of the model's files first")] = True,
    form: Annotated[
        Literal["huggingface", "torch_dist", "peft"],
        typer.Option("--format", help="torch_dist: a checkpoint that Megatron-LM loads in any layout; peft: LoRA adapters"),
    ] = "huggingface",
    space: Annotated[
        Path | None, typer.Option(help="write the demo of a run as a Hugging Face Space to this directory")
    ] = None,
    base: BaseOption = "",
    trained: TrainedOption = "",
    push: Annotated[
        str, typer.Option(metavar="[OWNER/]NAME", help="upload the model with a model card, or the Space, to this repository of the Hub")
    ] = "",
    private: Annotated[bool, typer.Option("--private", help="make the repository of --push private")] = False,
) -> None:
    """Write the model of any checkpoint as a Hugging Face directory, or the demo of a run as a Space; --push uploads it."""
    if target is not None and space is not None or (target, space, push) == (None, None, ""):
        refuse("export: give a checkpoint and the directory to write, a run and --space DIRECTORY, or either and --push NAME")
    if form != "huggingface" and (critic or target is None or push):
        refuse(f"export --format {form}: it is for the policy of a checkpoint, and is not pushed")
    if critic and push:
        refuse("--critic and --push: a policy is pushed")
    if not source.exists():  # checked first: the imports below take seconds
        refuse(f"{source} does not exist; `megatron-dapo checkpoint inspect RUN` lists the checkpoints of a run")
    from megatron_dapo.checkpoints.store import CheckpointError, step_of

    with tempfile.TemporaryDirectory(prefix="export-") as scratch, refusing(ValueError, OSError, CheckpointError):
        # An upload that will be refused must not cost an export first.
        repository = ""
        if push:
            with status("asking the Hub"):
                repository = own_repository(push)
        if space is not None:
            _write_space(source, space, base, trained, repository, private)
            return
        step = step_of(source.resolve().name)
        run, directory = source.resolve(), Path(trained) if trained else source / "huggingface"
        if target is not None or step is not None:
            run, directory = run.parent.parent, target or Path(scratch) / "model"
            with status("checking and writing the model"):
                line = _write_model(source, directory, critic, model, verify, form)
            if target is not None:
                typer.echo(line)
        if push:
            _push_model(run, directory, step, repository, private, base)


def _write_model(source: Path, target: Path, critic: bool, model: Path | None, verify: bool, form: str) -> str:
    """Write the model of a checkpoint and return the line about it."""
    from megatron_dapo.cli.checkpoint import export_adapters, export_checkpoint, export_torch_dist

    if form == "peft":
        return f"{target}: {export_adapters(source, target, model, verify):,} weights of adapters"
    if form == "torch_dist":
        return f"{target}: {size(export_torch_dist(source, target, model, verify))} for Megatron-LM"
    report = export_checkpoint(source, target, critic, model, verify)
    return f"{report.path}: {report.num_tensors} tensors, {size(report.num_bytes)}"


def _write_space(run: Path, directory: Path, base: str, trained: str, repository: str, is_private: bool) -> None:
    from megatron_dapo.demo.space import write_space

    with status("writing the Space"):
        write_space(run, directory, base, trained)
    if repository:
        _upload(repository, _files_of(directory), is_private, "space")
    else:
        typer.echo(f"{directory}: push it to a Space of yours (--push NAME, git, or `hf upload NAME {directory} --repo-type space`)")


def _push_model(run: Path, directory: Path, step: int | None, repository: str, is_private: bool, base: str) -> None:
    """Upload an exported model of a run, with a model card in place of any README.md that it has."""
    from megatron_dapo.config.loader import read_resolved
    from megatron_dapo.report.model_card import model_card

    if not (run / "config.json").is_file():
        raise ValueError(f"{run}: no config.json, so no run's directory: the model card is made of a run's records")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{run} has no exported model (huggingface/): name one of its checkpoints, or wait for its end")
    card = model_card(run, read_resolved(run / "config.json").config, step, base)
    _upload(repository, {**_files_of(directory), "README.md": card.encode()}, is_private, "model")


def _files_of(directory: Path) -> dict[str, Path | bytes]:
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}


def _upload(repository: str, files: Mapping[str, Path | bytes], is_private: bool, kind: Literal["model", "space"]) -> None:
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    typer.echo(upload(repository, files, is_private, kind))
