"""Models and data sets of the Hugging Face Hub: their names in a recipe, and their local copies.

    model.path = "Qwen/Qwen2.5-0.5B"                  or "hf://Qwen/Qwen2.5-0.5B@REVISION"
    data.train_paths = ["hf://OWNER/NAME"]            or "hf://OWNER/NAME@REVISION/DIRECTORY_OR_FILE"

The copy is in the Hub's cache under its commit, so the path that a run records pins the revision.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_dapo.untrusted import one_line

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # limit of the first request: without a network it must fail within a dry run's ten seconds
_PREFIX = "hf:"
_REFERENCE = re.compile(r"(?:datasets/)?([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(?:/(.+))?")
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
DATA_KINDS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv")
_SPLITS = {"train": ("train",), "eval": ("test", "validation", "valid", "eval")}
_MAX_LISTED = 8


@dataclass(frozen=True)
class HubReference:
    """A repository on the Hub, and the part of it that is requested."""

    repository: str
    revision: str | None = None
    part: str = ""  # a file or directory of it

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


class HubError(ValueError):
    """Raised if a repository is not available; the text says why and what to do."""


def hub_reference(path: Path, directory: Path, is_model: bool) -> HubReference | None:
    """Return the repository that an input of a recipe names, None for a local path.

    `path`: absolute, as the loader made it; `directory`: the one that relative inputs start from. A model needs no
    "hf://" if there is no directory with its owner's name.
    """
    if path.exists():
        return None
    if _PREFIX in path.parts:  # Any directory may precede it: a recipe written elsewhere keeps the name.
        text = "/".join(path.parts[path.parts.index(_PREFIX) + 1 :])
    elif is_model and path.parent.parent == directory and not path.parent.exists():
        text = path.relative_to(directory).as_posix()
    else:
        return None
    found = _REFERENCE.fullmatch(text)
    return HubReference(found[1], found[2], found[3] or "") if found else None


def marked_model(name: str) -> str:
    """Return a model's name as hf://OWNER/NAME if it names a repository from the current directory, else unchanged.

    With the prefix it names the same repository in a recipe in any directory.
    """
    reference = hub_reference(Path(os.path.abspath(name)), Path.cwd(), is_model=True)
    return f"hf://{reference}" if reference else name


def download_model(reference: HubReference) -> Path:
    """Return the local copy of a model, downloading what is missing. HubError if it is not available."""
    return _snapshot(reference, "model", list(_MODEL_FILES))


def download_data(reference: HubReference, split: str) -> list[Path]:
    """Return a data set's files: those of its part, or those whose path names the split ("train" or "eval").

    HubError if the data set is not available or has no such file.
    """
    root = _snapshot(reference, "dataset", [f"*{kind}" for kind in DATA_KINDS])
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.suffix in DATA_KINDS)
    chosen = list(_chosen(names, reference.part, split))
    if not chosen:
        listed = ", ".join(names[:_MAX_LISTED]) or f"no file of {', '.join(DATA_KINDS)}"
        raise HubError(
            f"data set {reference} of the Hub has no {reference.part or split + ' file'}; it has {listed}: name one as "
            f"hf://{reference}/FILE"
        )
    return [root / name for name in chosen]


def _chosen(names: list[str], part: str, split: str) -> Iterator[str]:
    if part:
        yield from (name for name in names if name == part or name.startswith(f"{part.rstrip('/')}/"))
        return
    data = [name for name in names if PurePosixPath(name).name != "dataset_infos.json"]
    words = _SPLITS[split]
    yield from (data if len(data) == 1 and split == "train" else (n for n in data if any(w in n for w in words)))


def _snapshot(reference: HubReference, kind: str, patterns: list[str]) -> Path:
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    options: dict[str, Any] = {"repo_id": reference.repository, "repo_type": kind, "allow_patterns": patterns}
    offline: Exception
    try:
        info = HfApi().repo_info(
            reference.repository, repo_type=kind, revision=reference.revision, timeout=TIMEOUT_S, files_metadata=False
        )
        logger.info("%s %s of the Hub, commit %s", kind, reference, info.sha)
        # Ask by name, not by commit, so that the cache finds it by name without a network.
        return Path(snapshot_download(revision=reference.revision, **options))
    except HfHubHTTPError as error:
        raise HubError(_refusal(reference, kind, error)) from error
    except HFValidationError as error:
        raise HubError(f"{reference} is no name of a Hub repository: {one_line(error)}") from error
    except (httpx.HTTPError, OfflineModeIsEnabled, OSError) as error:
        offline = error
    try:  # a copy of an earlier run serves
        return Path(snapshot_download(revision=reference.revision, local_files_only=True, **options))
    except (LocalEntryNotFoundError, OSError) as error:
        flag = " --repo-type dataset" if kind == "dataset" else ""
        raise HubError(
            f"there is no {reference} here, and the Hub cannot be reached ({type(offline).__name__}: {one_line(offline)[:120]}): on a "
            f"machine with a network run `hf download {reference.repository}{flag} --local-dir DIR`, copy DIR here and name it"
        ) from error


def _refusal(reference: HubReference, kind: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    reasons = {
        401: "it does not exist, or needs a token: run `hf auth login`",
        403: "access is not granted: ask for it on its page and run `hf auth login`",
        404: "there is no such repository or revision: check its name",
    }
    return f"{kind} {reference} of the Hub: {reasons.get(status, one_line(error)[:200])} (HTTP {status})"


def input_directory(origin: str) -> Path:
    """Return the directory from which a value's relative inputs start, by its origin: a recipe's file, or --set."""
    recipe = Path(origin)
    return Path(os.path.abspath(recipe.parent)) if recipe.suffix == ".toml" else Path.cwd()


def cached_repository(path: Path) -> str | None:
    """Return OWNER/NAME of the repository that a path in the Hub's cache is a copy of; None for any other path."""
    names = [part.split("--") for part in path.parts if part.startswith(("models--", "datasets--"))]
    return "/".join(names[-1][1:]) if names else None


def stored_license(directory: Path, repository: str = "") -> str | None:
    """Return the license that a model's card names, from its directory, else from the Hub; None if neither has it."""
    import httpx
    from huggingface_hub import HfApi, ModelCard

    try:
        if (card := directory / "README.md").is_file():
            return ModelCard.load(card).data.license
        if repository:
            found = HfApi().model_info(repository, timeout=TIMEOUT_S).card_data
            return found.license if found else None
    except (httpx.HTTPError, OSError, ValueError):
        pass  # a card without it is complete
    return None
