"""The commands of `megatron-dapo convert`: models to Megatron's layouts, back, and compared bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megatron_dapo.checkpoints.store import step_of
from megatron_dapo.cli.options import refuse, refusing

convert_app = typer.Typer(
    no_args_is_help=True, help="Convert between Hugging Face directories and Megatron checkpoints, and compare models."
)

Converted = Annotated[Path, typer.Argument(help="directory to write; must not exist")]


@convert_app.command("hf-to-megatron")
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(help="Hugging Face directory with safetensors")],
    target: Converted,
    tensor: Annotated[int, typer.Option(help="tensor-parallel size")] = 1,
    pipeline: Annotated[int, typer.Option(help="pipeline-parallel size")] = 1,
    virtual_pipeline: Annotated[int, typer.Option(help="model chunks of a pipeline rank")] = 1,
    expert: Annotated[int, typer.Option(help="expert-parallel size")] = 1,
    expert_tensor: Annotated[
        int | None, typer.Option(help="ranks that each expert is split over; default: --tensor")
    ] = None,
    form: Annotated[
        Literal["ranks", "torch_dist"],
        typer.Option(
            "--format", help="one file a rank, or torch_dist: a checkpoint that Megatron-LM loads in any layout"
        ),
    ] = "ranks",
) -> None:
    """Split a Hugging Face model into one file per Megatron rank, or write it as a torch_dist checkpoint."""
    from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
    from megatron_dapo.converters.convert import huggingface_to_megatron
    from megatron_dapo.converters.torch_dist import write_torch_dist_model

    _refuse_run_checkpoint("hf-to-megatron", source)
    sizes: dict[str, Any] = {
        "tensor": tensor,
        "pipeline": pipeline,
        "virtual_pipeline": virtual_pipeline,
        "expert": expert,
        "expert_tensor": expert_tensor,
    }
    with refusing(ValueError, OSError, prefix="convert hf-to-megatron: "):
        if form == "ranks":
            typer.echo(huggingface_to_megatron(source, target, **sizes))
            return
        if any(size not in (None, 1) for size in sizes.values()):
            raise ValueError("--format torch_dist has no layout: leave the parallel sizes out")
        with HFCheckpoint(source) as model:
            typer.echo(f"{write_torch_dist_model(model, source, target):,} bytes")


@convert_app.command("megatron-to-hf")
def megatron_to_hf(
    source: Annotated[
        Path, typer.Argument(help="directory of hf-to-megatron, of Megatron-LM (torch_dist), or a run's step_*")
    ],
    target: Converted,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the same model, for a checkpoint of Megatron-LM")
    ] = None,
    shard_bytes: Annotated[
        int | None, typer.Option(min=1, help="largest safetensors file; default: 5,000,000,000")
    ] = None,
) -> None:
    """Write a Megatron checkpoint as a Hugging Face directory, with the names, types and side files of the original."""
    from megatron_dapo.checkpoints.formats.huggingface_writer import DEFAULT_SHARD_BYTES
    from megatron_dapo.checkpoints.store import CheckpointError
    from megatron_dapo.cli.checkpoint import export_checkpoint
    from megatron_dapo.converters.convert import megatron_to_huggingface
    from megatron_dapo.converters.torch_dist import convert_torch_dist, is_torch_dist

    limit = shard_bytes or DEFAULT_SHARD_BYTES
    with refusing(ValueError, OSError, CheckpointError, prefix="convert megatron-to-hf: "):
        if step_of(source.resolve().name) is not None:
            report = export_checkpoint(source, target, source=model)
        elif is_torch_dist(source):
            report = convert_torch_dist(source, target, model, limit)
        else:
            typer.echo(megatron_to_huggingface(source, target, shard_bytes=limit))
            return
    typer.echo(f"{report.num_tensors} tensors, {report.num_bytes:,} bytes")


@convert_app.command("verify")
def verify(
    first: Annotated[Path, typer.Argument(help="Hugging Face directory, or one of hf-to-megatron")],
    second: Annotated[Path, typer.Argument(help="the other one, of either kind")],
) -> None:
    """Compare two models bit for bit and print the first difference.

    Exit code: 0 the same names, shapes, types and bits; 1 different; 2 one cannot be read.
    """
    from megatron_dapo.converters.convert import first_difference

    for source in (first, second):
        _refuse_run_checkpoint("verify", source)
    with refusing(ValueError, OSError, prefix="convert verify: "):
        difference = first_difference(first, second)
    typer.echo(f"different: {difference}" if difference else "identical")
    raise typer.Exit(1 if difference else 0)


def _refuse_run_checkpoint(command: str, source: Path) -> None:
    if step_of(source.resolve().name) is not None:
        refuse(
            f"convert {command}: {source} is a checkpoint of a run; `megatron-dapo export {source} DIRECTORY` writes its "
            "model for Hugging Face, `megatron-dapo checkpoint inspect A B` compares two"
        )
