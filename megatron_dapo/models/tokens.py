"""The words of a model directory's tokenizer.json, compared without a tokenizer's library."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.untrusted import read_json

TOKENIZER_FILE = "tokenizer.json"


def check_same_tokens(role: str, directory: str | Path, policy_directory: str | Path) -> None:
    """Raise ValueError if both directories have a tokenizer and some token has different ids. `role`: what the error calls
    the model of `directory`."""
    ours, theirs = (_vocabulary(Path(path) / TOKENIZER_FILE) for path in (directory, policy_directory))
    # Without both files there is nothing to compare; the vocabulary size is checked with the layers.
    if ours is None or theirs is None or ours == theirs:
        return
    different = sum(ours.get(token) != theirs.get(token) for token in {*ours, *theirs})
    raise ValueError(
        f"{role} {directory} has another tokenizer than the policy {policy_directory}: {len(ours)} and {len(theirs)} tokens, "
        f"{different} of them not the same; take a model with the policy's tokenizer, or the policy"
    )


def _vocabulary(path: Path) -> dict[str, int] | None:
    """Return token -> id of a tokenizer.json, added tokens included; None without such a file."""
    try:
        content = read_json(path)
        vocabulary = content["model"]["vocab"]
        # Unigram models list [token, score] pairs in the order of their ids.
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
        return {**dict(pairs), **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: not a tokenizer: {error!r}") from None
