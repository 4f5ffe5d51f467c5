"""Lists, verifies, compares and exports checkpoints after they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_dapo.checkpoints.disk_space import size
from megatron_dapo.checkpoints.export import ExportReport, export_stored_model
from megatron_dapo.checkpoints.formats.huggingface import HFCheckpoint
from megatron_dapo.checkpoints.formats.peft import AdapterDescription, MergedModel, base_fingerprint, write_peft
from megatron_dapo.checkpoints.formats.safetensors import StoredModel
from megatron_dapo.checkpoints.formats.saved_model import SavedModel, index_file, model_names
from megatron_dapo.checkpoints.state_difference import compare_states
from megatron_dapo.checkpoints.store import Checkpoint, CheckpointError, CheckpointStore, step_of, wrong_files
from megatron_dapo.config import Config, read_resolved
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.trainer.build import critic_start
from megatron_dapo.trainer.checkpointing import CRITIC, POLICY

RUN_CONFIG = "config.json"


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory after checking its manifest and file sizes. CheckpointError with the reason
    if it is not a checkpoint, or incomplete."""
    path = path.resolve()
    step = step_of(path.name)
    if step is None:
        steps = _store(path).steps()
        there = f"{path} holds checkpoints of steps {steps}" if steps else f"{path} holds no checkpoint"
        raise CheckpointError(f"{there}; name a directory such as {path / 'step_000012'}")
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist; its run has the steps {_store(path.parent).steps()}")
    return CheckpointStore(path.parent, keep=1).open(step)


def require_intact(checkpoint: Checkpoint, names: Sequence[str] | None = None) -> None:
    """Raise CheckpointError unless every byte of the files (None: of all) is what was written."""
    wrong = wrong_files(checkpoint, sorted(checkpoint.files) if names is None else names)
    if wrong:
        raise CheckpointError(
            f"checkpoint {checkpoint.directory}: contents of {', '.join(wrong)} changed since they were written; use another step"
        )


def export_checkpoint(
    path: Path, target: Path, is_critic: bool = False, source: Path | None = None, verifies: bool = True
) -> ExportReport:
    """Write the policy or critic of a checkpoint as a Hugging Face directory, as its run does at its end.

    source: the directory that the model started from, whose config, tokenizer and types are taken over; None: the one that
    the run's config.json names. ValueError, CheckpointError or OSError in one line; then `target` is not there.
    """
    checkpoint, name, source = _exportable(path, is_critic, source, verifies)
    with whole_model(checkpoint, name, source) as model:
        return export_stored_model(target, model, source, has_value_head=is_critic)


@contextmanager
def whole_model(checkpoint: Checkpoint, name: str, source: Path) -> Iterator[StoredModel]:
    """Open a checkpoint's model; adapters are merged into the weights of `source`, which must be those they belong to."""
    with SavedModel(checkpoint.directory, name) as model, ExitStack() as stack:
        if model.lora is None:
            yield model
            return
        require_base(model.lora, source, checkpoint.directory)
        base = stack.enter_context(HFCheckpoint(source))
        yield MergedModel(base, read_architecture(source), model, model.lora)


def require_base(lora: AdapterDescription, source: Path, checkpoint: Path) -> None:
    """Raise ValueError unless `source` is the model that the adapters in `checkpoint` belong to."""
    own = replace(lora, base_path=str(source), base_fingerprint=base_fingerprint(source))
    lora.require_same_as(own, str(checkpoint))


def export_adapters(path: Path, target: Path, source: Path | None = None, verifies: bool = True) -> int:
    """Write the adapters of a checkpoint as a PEFT directory and return their number of elements.

    Arguments and errors are those of `export_checkpoint`; ValueError for a checkpoint without adapters.
    """
    checkpoint, name, source = _exportable(path, False, source, verifies)
    with SavedModel(checkpoint.directory, name) as model:
        if model.lora is None:
            raise ValueError(f"checkpoint {checkpoint.directory}: its run trained all weights, not adapters: leave --format out")
        require_base(model.lora, source, checkpoint.directory)
        write_peft(target, replace(model.lora, base_path=str(source)), model.specs, model.read_tensor)
        return sum(spec.num_elements for spec in model.specs.values())


def export_torch_dist(path: Path, target: Path, source: Path | None = None, verifies: bool = True) -> int:
    """Write the policy of a checkpoint as a torch_dist directory of Megatron-LM and return its bytes.

    The parameters are in the run's type, without the optimizer. Arguments and errors are those of `export_checkpoint`.
    """
    from megatron_dapo.converters.torch_dist import write_torch_dist_model

    checkpoint, name, source = _exportable(path, False, source, verifies)
    with whole_model(checkpoint, name, source) as model:
        return write_torch_dist_model(model, source, target, checkpoint.step)


def _exportable(path: Path, is_critic: bool, source: Path | None, verifies: bool) -> tuple[Checkpoint, str, Path]:
    """Return a checkpoint, the name of its model, and the directory that the model started from."""
    checkpoint = open_checkpoint(path)
    name = CRITIC if is_critic else POLICY
    if index_file(name) not in checkpoint.files:
        models = ", ".join(_models(checkpoint)) or "no model in a format that this release reads"
        raise CheckpointError(f"checkpoint {checkpoint.directory}: no {name}; it holds {models}")
    if source is None:
        config = _run_config(checkpoint)
        source = critic_start(config) if is_critic else config.model.path
    if not (source / "config.json").is_file():
        raise ValueError(f"{source}: no config.json there; name the directory that the run started from with --model")
    if verifies:
        require_intact(checkpoint, [file for file in sorted(checkpoint.files) if file.startswith(name)])
    return checkpoint, name, source


def _run_config(checkpoint: Checkpoint) -> Config:
    path = checkpoint.directory.parent.parent / RUN_CONFIG
    if not path.is_file():
        raise ValueError(
            f"checkpoint {checkpoint.directory} is not in its run's directory (no {path}); name the directory that the run "
            "started from with --model"
        )
    return read_resolved(path).config


def _models(checkpoint: Checkpoint) -> list[str]:
    return model_names(checkpoint.files)


def _store(path: Path) -> CheckpointStore:
    """Return the store of a run's directory, or of a directory of checkpoints."""
    inside = path / "checkpoints"
    return CheckpointStore(inside if inside.is_dir() else path, keep=1)


def inspect(path: Path, verifies: bool = False) -> dict[str, Any]:
    """Describe a checkpoint, or all those of a run's directory. `verifies`: by reading every byte of them.

    CheckpointError if there is none.
    """
    if step_of(path.resolve().name) is not None:
        return describe(open_checkpoint(path), verifies)
    store = _store(path)
    steps = sorted(store.steps())
    if not steps:
        raise CheckpointError(
            f"{path} holds no checkpoint; name a run's directory, one of checkpoints, or a step_* in it"
        )
    return {"directory": str(store.directory), "checkpoints": [_summary(store, step, verifies) for step in steps]}


def _summary(store: CheckpointStore, step: int, verifies: bool) -> dict[str, Any]:
    try:
        checkpoint = store.open(step)
        if verifies:
            require_intact(checkpoint)
    except (CheckpointError, OSError) as error:
        return {"step": step, "problem": str(error)}
    return _facts(checkpoint)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "num_bytes": sum(entry.size for entry in checkpoint.files.values()),
        "num_files": len(checkpoint.files),
        "layout": checkpoint.metadata.get("layout"),
        "evaluation": checkpoint.metadata.get("evaluations", {}).get(str(checkpoint.step)),
    }


def describe(checkpoint: Checkpoint, verifies: bool = False) -> dict[str, Any]:
    """Return all facts of one checkpoint: files, models and their tensors. CheckpointError if it is damaged."""
    if verifies:
        require_intact(checkpoint)
    models = {}
    for name in _models(checkpoint):
        with SavedModel(checkpoint.directory, name) as model:
            models[name] = {
                "layout": dict(model.layout),
                "distributed_optimizer": model.distributed,
                "kinds": {kind: str(dtype).removeprefix("torch.") for kind, dtype in model.kinds.items()},
                "num_parameters": sum(spec.num_elements for spec in model.specs.values()),
                "num_slices": len(model.slices),
                "tensors": {tensor: list(spec.shape) for tensor, spec in model.specs.items()},
            }
    return {
        "directory": str(checkpoint.directory),
        **_facts(checkpoint),
        "is_verified": verifies,
        "files": {entry.name: entry.size for entry in checkpoint.files.values()},
        "models": models,
    }


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Compare the models of two checkpoints, whatever layouts saved them; see `compare_states`."""
    checkpoints = [open_checkpoint(path) for path in (first, second)]
    names = [_models(checkpoint) for checkpoint in checkpoints]
    if names[0] != names[1] or not names[0]:
        raise CheckpointError(
            f"{first} holds {', '.join(names[0]) or 'no model'}, {second} {', '.join(names[1]) or 'no model'}: nothing to compare"
        )
    differences = {}
    for name in names[0]:
        with SavedModel(checkpoints[0].directory, name) as a, SavedModel(checkpoints[1].directory, name) as b:
            differences[name] = [asdict(difference) for difference in compare_states(a, b)]
    is_equal = not any(kind["first"] for kinds in differences.values() for kind in kinds)
    return {"is_equal": is_equal, "steps": [checkpoint.step for checkpoint in checkpoints], "models": differences}


def inspection_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of what `inspect` returned."""
    if "checkpoints" in facts:
        yield f"{facts['directory']}: {len(facts['checkpoints'])} checkpoints"
        for one in facts["checkpoints"]:
            yield f"step {one['step']}: " + (one.get("problem") or _summary_text(one))
        return
    checked = "every byte verified" if facts["is_verified"] else "sizes checked"
    yield f"{facts['directory']}: step {facts['step']}, {_summary_text(facts)}; {checked}"
    for name, model in facts["models"].items():
        kinds = ", ".join(f"{kind} {dtype}" for kind, dtype in model["kinds"].items())
        yield f"{name}: {model['num_parameters']} parameters in {model['num_slices']} slices; {kinds}"
        yield from (f"  {tensor} {tuple(shape)}" for tensor, shape in model["tensors"].items())
    yield from (f"{file}: {size(num_bytes)}" for file, num_bytes in sorted(facts["files"].items()))


def _summary_text(facts: dict[str, Any]) -> str:
    layout = facts["layout"] or {}
    sizes = " ".join(f"{name} {count}" for name, count in layout.items() if isinstance(count, int) and count > 1)
    evaluation = facts["evaluation"] or {}
    accuracy = f", eval/avg_at_k {evaluation['eval/avg_at_k']:.4g}" if "eval/avg_at_k" in evaluation else ""
    return f"{size(facts['num_bytes'])} in {facts['num_files']} files, saved by {sizes or 'one rank'}{accuracy}"


def comparison_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of what `compare` returned, the verdict last."""
    for name, kinds in facts["models"].items():
        for one in kinds:
            differs = (
                f"{one['num_different']} of {one['num_elements']} elements differ, by at most {one['largest']:.3g}"
            )
            yield f"{name} {one['kind']}: " + (f"{differs}; first {one['first']}" if one["first"] else "equal")
    yield "equal" if facts["is_equal"] else "different"
