"""Models and data that a recipe names on the Hugging Face Hub, replaced by their local copies before anything reads them."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.config import LoadedConfig
from megatron_dapo.config.loader import TASK_PREFIX, toml_value
from megatron_dapo.config.rules import UnusableInput, Violation
from megatron_dapo.data.hub import HubError, download_data, download_model, hub_reference, input_directory

_DATA = {"data.train_paths": "train", "data.eval_paths": "eval"}


def local_copies(loaded: LoadedConfig) -> tuple[list[str], list[Violation]]:
    """Download what is named on the Hub; return overrides with the copies' paths, and a line for each that cannot be had.

    The path of a copy holds the commit, so what is recorded of the run, and its restarts, are of that revision.
    """
    config = loaded.config
    overrides, problems = local_model(loaded)
    for field, split in _DATA.items():
        paths = getattr(config.data, field.partition(".")[2])
        directory = input_directory(loaded.origins[field])
        try:
            found = [copy for path in paths for copy in _copies(path, directory, split)]
        except HubError as error:
            problems.append(UnusableInput(field, str(error)))
            continue
        if found != list(paths):
            overrides.append(f"{field}={toml_value([str(path) for path in found])}")
    tables, changed = [], False
    directory = input_directory(loaded.origins["data.sources"])
    for source in config.data.sources:
        table = source.model_dump(mode="json", exclude_none=True)
        if not source.path.startswith(TASK_PREFIX):
            try:
                copies = _copies(Path(source.path), directory, "train")
            except HubError as error:
                problems.append(UnusableInput("data.sources", str(error)))
                continue
            if len(copies) > 1:
                words = f"{source.path} has {len(copies)} files of that split; name one: hf://OWNER/NAME/FILE"
                problems.append(UnusableInput("data.sources", words))
            changed |= str(copies[0]) != source.path
            table["path"] = str(copies[0])
        tables.append(table)
    return overrides + ([f"data.sources={toml_value(tables)}"] if changed else []), problems


def local_model(loaded: LoadedConfig) -> tuple[list[str], list[Violation]]:
    """Return the same as `local_copies`, but only for the model."""
    directory = input_directory(loaded.origins["model.path"])
    reference = hub_reference(loaded.config.model.path, directory, is_model=True)
    if reference is None:
        return [], []
    try:
        return [f"model.path={toml_value(str(download_model(reference)))}"], []
    except HubError as error:
        return [], [UnusableInput("model.path", str(error))]


def _copies(path: Path, directory: Path, split: str) -> list[Path]:
    reference = hub_reference(path, directory, is_model=False)
    return download_data(reference, split) if reference else [path]
