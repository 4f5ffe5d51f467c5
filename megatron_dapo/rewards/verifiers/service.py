"""Requests from presets to an HTTP service: concurrent, with retries, backoff, and a score for failures."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import httpx

from megatron_dapo.rewards.result import VerifierResult

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 30.0
_MARGIN_S = 0.5  # left of an answer's deadline to say what it was waiting for
_MAX_REPLY_BYTES = 64 * 2**20
_RETRIED = frozenset((408, 409, 425, 429, *range(500, 600)))
Result = TypeVar("Result")


class ServiceError(Exception):
    """Raised when a request has failed for good, with each attempt's failure."""


class Service:
    """Posts JSON to one URL.

    Args:
        own: `url`, `key_variable` (environment variable with a bearer token; "": none), `request_seconds`, `retries` (attempts
            after the first), `failure` ("error", or the reward of a response whose request failed).
        timeout_s: seconds for all attempts of one call together.
        path: suffix added to the URL.
    """

    def __init__(self, own: Mapping[str, Any], timeout_s: float, path: str = "") -> None:
        self._url = own["url"].rstrip("/") + path
        self._retries, self._request_s = own["retries"], own["request_seconds"]
        self._deadline_s = max(0.1, timeout_s - _MARGIN_S)
        failure = own["failure"]
        self._failure = None if failure == "error" else float(failure)
        variable = own["key_variable"]
        if variable and not os.environ.get(variable):
            raise ValueError(f"the environment variable {variable} (key_variable) is not set")
        self._headers = {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}
        self._client: httpx.AsyncClient | None = None

    async def within_deadline(self, work: Awaitable[Result], num: int = 1) -> Result | list[VerifierResult]:
        """Await `work`; if it fails, return the results for its `num` responses."""
        try:
            return await asyncio.wait_for(work, self._deadline_s)
        except asyncio.TimeoutError:
            outcome, why = "timeout", f"no verdict of {self._url} in {self._deadline_s:g} s"
        except ServiceError as error:
            outcome, why = "error", str(error)
        return [VerifierResult(outcome, reward=self._failure, detail={"error": why})] * num

    async def post(self, body: Mapping[str, Any]) -> Any:
        """Return the JSON of the reply. Raises ServiceError if no attempt got one, and at once for a refusal (4xx)."""
        if self._client is None:  # created here because it belongs to the running loop
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=self._request_s, limits=limits)
        why = ""
        for attempt in range(self._retries + 1):
            pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.5)
            try:
                reply = await self._client.post(self._url, json=body)
                if reply.status_code == 200:
                    if len(reply.content) > _MAX_REPLY_BYTES:
                        raise ServiceError(f"{self._url}: a reply of {len(reply.content)} bytes")
                    return reply.json()
                why = f"status {reply.status_code}: {reply.text[:200]!r}"
                if reply.status_code not in _RETRIED:
                    break
                pause = max(pause, min(_MAX_PAUSE_S, _seconds(reply.headers.get("retry-after", ""))))
            except httpx.HTTPError as error:
                why = f"{type(error).__name__} {error}".strip()
            except ValueError as error:
                why = f"a reply that is no JSON: {error}"
            if attempt < self._retries:
                await asyncio.sleep(pause)
        raise ServiceError(f"{self._url}: {why} (attempt {attempt + 1} of {self._retries + 1})")


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0
