"""Uploads to the Hugging Face Hub: whose repository it is, and one commit with all files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megatron_dapo.data.hub import HubError
from megatron_dapo.untrusted import one_line

Kind = Literal["model", "space"]
_LOGIN = "run `hf auth login`, or set HF_TOKEN to a token that may write"


def own_repository(name: str) -> str:
    """Return NAME or OWNER/NAME as OWNER/NAME. HubError without a token, without the Hub, or if the owner is neither the
    token's account nor an organization of it."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import validate_repo_id

    with _explained(name):
        validate_repo_id(name)
        if get_token() is None:
            raise HubError(f"{name}: there is no token of the Hub here: {_LOGIN}")
        account = HfApi().whoami()
    owner, _, rest = name.rpartition("/")
    owners = [account["name"], *(one["name"] for one in account.get("orgs", ()))]
    if owner and owner not in owners:
        raise HubError(f"{name}: {owner} is not an account of this token ({', '.join(owners)}): push to {account['name']}/{rest}")
    return f"{owner or account['name']}/{rest}"


def upload(repository: str, files: Mapping[str, Path | bytes], is_private: bool = False, kind: Kind = "model") -> str:
    """Make a repository unless it is there, commit files by their names in it, and return its address.

    HubError if the token may not write there, or a repository that has to be private is public.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    with _explained(repository):
        sdk = "gradio" if kind == "space" else None
        url = api.create_repo(repository, repo_type=kind, private=is_private or None, exist_ok=True, space_sdk=sdk)
        if is_private and not api.repo_info(repository, repo_type=kind).private:
            raise HubError(f"{repository} exists and is public: push to another name, or make it private on its page first")
        api.create_commit(
            repository,
            [CommitOperationAdd(name, content if isinstance(content, bytes) else str(content)) for name, content in files.items()],
            commit_message="Upload by megatron_dapo",
            repo_type=kind,
        )
    return str(url)


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Raise HubError, in one line with what to do, for an error of the Hub's client."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise HubError(f"{repository!r} is no name of a Hub repository (OWNER/NAME): {one_line(error)}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: f"the token is not valid: {_LOGIN}",
            403: "the token may not write there: give it the right on huggingface.co/settings/tokens, or ask the owner",
        }
        reason = reasons.get(status, one_line(error.server_message or error)[:200])
        raise HubError(f"{repository}: {reason} (HTTP {status})") from error
    except (httpx.HTTPError, OfflineModeIsEnabled) as error:
        raise HubError(
            f"{repository}: the Hub cannot be reached ({type(error).__name__}: {one_line(error)[:120]}): on a machine with a network "
            f"run `hf upload {repository} DIRECTORY`"
        ) from error
