"""Check that a SGLang server serves what the run expects."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megatron_dapo.engines.sglang import protocol
from megatron_dapo.engines.sglang.keys import read_key
from megatron_dapo.engines.sglang.server_settings import DTYPES, WEIGHT_LOADER, ServerSettings
from megatron_dapo.engines.sglang.versions import ApiVersion, api_version_of, newest, supported_range
from megatron_dapo.models.families import text_fields
from megatron_dapo.untrusted import one_line, read_json

logger = logging.getLogger(__name__)

_CALL_S = 60.0
_IMPOSSIBLE_TOKEN = 1 << 40


class EngineStartError(RuntimeError):
    """A server ended, did not come up in time, or serves something else than expected."""


@dataclass(frozen=True)
class Expectation:
    """The model and mode a server must serve. `seeded`: its deterministic mode is on. `routing`: it can return experts."""

    architecture: str
    vocab_size: int
    dtype: str
    tensor_parallel: int
    seeded: bool = False
    routing: bool = False

    @classmethod
    def of(cls, settings: ServerSettings) -> Expectation:
        """Read the expectation from the model's config.json. Raise ValueError if it lacks a field."""
        file = settings.model_path / "config.json"
        try:
            config = text_fields(read_json(file))
            architecture, vocab_size = str(config["architectures"][0]), int(config["vocab_size"])
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError) as error:
            raise ValueError(
                f"{file}: cannot tell architectures and vocab_size from it ({one_line(repr(error))}); model_path must be a "
                "Hugging Face checkpoint directory"
            ) from error
        dtype, tensor_parallel = DTYPES[settings.dtype], settings.tensor_parallel
        return cls(architecture, vocab_size, dtype, tensor_parallel, settings.seeded, settings.routing)


@dataclass(frozen=True)
class ServerInfo:
    """A healthy server's description of itself."""

    api_version: ApiVersion
    model_path: str
    architecture: str
    vocab_size: int
    dtype: str
    tensor_parallel: int
    max_total_tokens: int
    attention_backend: str
    sampling_backend: str
    seeded: bool
    routing: bool
    weight_loaders: tuple[str, ...]


def open_http(url: str, key_file: Path) -> httpx.Client:
    """Connections to a server, with its key."""
    # No proxy from the environment: the key goes only to the engine.
    headers = {"Authorization": f"Bearer {read_key(key_file)}"}
    return httpx.Client(base_url=url, headers=headers, timeout=_CALL_S, trust_env=False)


def checked(url: str, http: httpx.Client, expectation: Expectation) -> ServerInfo:
    """Return the server's description. Raise EngineStartError if it is not as expected."""
    api_version = api_version_of(str(_json(http, "/server_info").get("version")))
    info = (_server_info if api_version.is_tested else _probed_info)(url, http, api_version)
    found, wanted = vars(info), vars(expectation)
    names = ("architecture", "vocab_size", "dtype", "tensor_parallel")
    wrong = [f"{name} {found[name]}, not {wanted[name]}" for name in names if found[name] != wanted[name]]
    if expectation.seeded and not info.seeded:
        wrong.append("no seeds per request: start it with --enable-deterministic-inference")
    if expectation.routing and not info.routing:
        wrong.append("no experts in its answers: start it with --enable-return-routed-experts")
    if WEIGHT_LOADER not in info.weight_loaders:
        wrong.append(f"no way to update its weights: start it with --custom-weight-loader {WEIGHT_LOADER}")
    if wrong:
        raise EngineStartError(f"it serves another model than expected ({info.model_path}): {'; '.join(wrong)}")
    logger.info(
        "%s: SGLang %s, attention %s, sampling %s, a cache of %d tokens",
        url,
        info.api_version.version,
        info.attention_backend,
        info.sampling_backend,
        info.max_total_tokens,
    )
    return info


def _probed_info(url: str, http: httpx.Client, api_version: ApiVersion) -> ServerInfo:
    """`_server_info` of a version newer than those tested. EngineStartError if the protocol probe fails."""
    version = api_version.version
    try:
        info = _server_info(url, http, api_version)
        problems = protocol.problems(http, info.vocab_size)
    except (EngineStartError, httpx.HTTPError, ValueError, LookupError) as error:
        problems = [str(error) or repr(error)]
    if problems:
        raise EngineStartError(
            f"SGLang {version} is newer than what is tested, {supported_range()}, and fails the protocol probe: "
            f"{'; '.join(problems)}; install sglang=={newest()} in the engine's environment"
        )
    _warn_untested(version)
    return info


@functools.cache
def _warn_untested(version: str) -> None:
    """Warn once a process, not for each server."""
    logger.warning(
        "SGLang %s is newer than what is tested, %s; the protocol probe passed, so it is used", version, supported_range()
    )


def _server_info(url: str, http: httpx.Client, api_version: ApiVersion) -> ServerInfo:
    server, model = _json(http, "/server_info"), _json(http, "/model_info")
    try:
        return ServerInfo(
            api_version=api_version,
            model_path=str(model["model_path"]),
            architecture=str((model.get("architectures") or ["unknown"])[0]),
            vocab_size=_vocab_size(http),
            dtype=DTYPES.get(str(server["dtype"]), str(server["dtype"])),
            tensor_parallel=int(server["tp_size"]),
            max_total_tokens=int(server["max_total_num_tokens"]),
            attention_backend=str(server.get("attention_backend")),
            sampling_backend=str(server.get("sampling_backend")),
            seeded=bool(server.get("enable_deterministic_inference")),
            routing=bool(server.get("enable_return_routed_experts")),
            weight_loaders=tuple(server.get("custom_weight_loader") or ()),
        )
    except (KeyError, TypeError) as error:
        raise EngineStartError(f"{url} does not answer like a SGLang server: {error!r}") from error


def _vocab_size(http: httpx.Client) -> int:
    """The vocabulary in use. No endpoint tells it, but the refusal of a token beyond it does; nothing is generated."""
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [_IMPOSSIBLE_TOKEN],
    }
    answer = http.post("/generate", json=body)
    match = re.search(r"valid range is \[0, (\d+)\)", answer.text)
    if match is None:
        raise EngineStartError(
            f"cannot tell its vocabulary: /generate answers {answer.status_code} {answer.text[:200]}"
        )
    return int(match.group(1))


def _json(http: httpx.Client, path: str) -> dict[str, Any]:
    answer = http.get(path)
    if answer.status_code == 401:
        raise EngineStartError(f"it refuses the key ({path} answers 401): it was started with another one")
    try:
        document = answer.json() if answer.status_code == 200 else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise EngineStartError(f"{path} answers {answer.status_code} {answer.text[:200]!r}")
    return document
