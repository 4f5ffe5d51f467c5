"""HTTP server of a policy for clients of chat APIs: a session is an episode, and its API key says which.

    client --request--> tree: which turn is it, on which stream? --> source: sample it --> answer --> client

A client that goes away leaves its turn to be sampled: the same request, sent again, gets that answer. So does one whose
headers say that it is a retry. A retry neither samples twice nor loses what was sampled.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from megatron_dapo.data.template import Messages
from megatron_dapo.data.turns import ROLES
from megatron_dapo.engines.endpoint import chat, messages, responses
from megatron_dapo.engines.endpoint.format import MODEL, APIFormat, ChatAnswer, ChatRequest, Sampling
from megatron_dapo.engines.endpoint.tree import ConversationTree, Match, RequestError, ServedTurn, TooManyBranches
from megatron_dapo.types import SamplingParams

_MAX_BODY_BYTES = 64 << 20
_FORMATS: Mapping[str, APIFormat] = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
# Requests for the number of tokens that a turn's context would have, and what else the answer has.
_COUNTS: Mapping[str, tuple[APIFormat, Mapping[str, str]]] = {
    "/v1/messages/count_tokens": (messages, {}),
    "/v1/responses/input_tokens": (responses, {"object": "response.input_tokens"}),
}
_RETRIES = "x-stainless-retry-count"  # The OpenAI and Anthropic clients count their retries in it.


class EpisodeOver(RuntimeError):
    """A turn that is not sampled because its episode has ended; the message says by which limit."""


class TurnSource(Protocol):
    """What samples the turns that clients ask for."""

    async def sample(self, session: str, turn: ServedTurn, max_tokens: int | None) -> ChatAnswer:
        """Return the turn's answer. EpisodeOver if the episode gets no more turns, ValueError for a turn that cannot be."""

    async def count(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], after: ChatAnswer | None, begins_episode: bool
    ) -> int:
        """Return the number of tokens up to the turn that would answer the messages, which follow an earlier answer."""

    def lose(self, session: str, reason: str) -> None:
        """End the episode: its client does what it must not."""


@dataclass
class Session:
    """An episode that a client plays."""

    name: str
    tree: ConversationTree
    answers: dict[ServedTurn, asyncio.Task[ChatAnswer]] = field(default_factory=dict)  # given, or being sampled
    ignored: set[str] = field(default_factory=set)  # fields that clients requested and did not get
    num_refused: int = 0  # requests for a turn with status 400
    # Turns of Responses by their id, each with the number of its first messages that are instructions.
    responses: dict[str, tuple[ServedTurn, int]] = field(default_factory=dict)

    def continued(self, request: ChatRequest) -> tuple[ChatRequest, ServedTurn | None]:
        """Return a request with the messages of the response that it follows, and that response's turn.

        RequestError if there is no such response.
        """
        if request.follows is None:
            return request, None
        turn, num_instructions = self.responses.get(request.follows, (None, 0))
        if turn is None or turn.answer is None:
            raise RequestError(
                f"previous_response_id = {json.dumps(request.follows)} is no response of this episode; "
                "send the conversation as input"
            )
        instructions, said = request.messages[: request.num_instructions], request.messages[request.num_instructions :]
        before = turn.conversation()[num_instructions:]
        return replace(request, messages=(*instructions, *before, *said)), turn


class ChatEndpoint:
    """The server's sessions and routes. Used from one event loop."""

    def __init__(
        self,
        source: TurnSource,
        sampling: SamplingParams,
        *,
        on_other_sampling: Sampling = "refuse",
        match: Match = "loose",
        max_branches: int = 16,
        roles: Sequence[str] = ROLES,
    ) -> None:
        """`roles`: of messages that may follow an answer."""
        self._source, self._sampling, self._on_other_sampling = source, sampling, on_other_sampling
        self._match, self._max_branches, self._roles = match, max_branches, roles
        self._sessions: dict[str, Session] = {}  # keyed by API key

    def open(self, name: str) -> str:
        """Begin a session and return its API key."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        tree = ConversationTree(match=self._match, max_streams=self._max_branches, roles=self._roles)
        self._sessions[key] = Session(name, tree)
        return key

    def num_refused(self, key: str) -> int:
        """Return how many requests of an open session were answered with 400."""
        return self._sessions[key].num_refused

    async def end(self, key: str) -> Session:
        """End a session: its key is unknown from now on, and turns that are being sampled are given up."""
        session = self._sessions.pop(key)
        tasks = list(session.answers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return session

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                *(web.post(path, self._turn) for path in _FORMATS),
                *(web.post(path, self._count) for path in _COUNTS),
            ]
        )
        return application

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"sessions": len(self._sessions)})

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_dapo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _turn(self, http: web.Request) -> web.StreamResponse:
        session = self._session_of(http)
        try:
            return await self._turn_of(session, http)
        except RequestError:
            session.num_refused += 1
            raise

    async def _turn_of(self, session: Session, http: web.Request) -> web.StreamResponse:
        body = await _json_of(http)
        request, ignored = _FORMATS[http.path].parse(body, self._sampling, self._on_other_sampling)
        session.ignored.update(ignored)
        request, after = session.continued(request)
        try:
            turn = session.tree.ask(
                request.messages, request.tools, is_retry=http.headers.get(_RETRIES, "0") != "0", after=after
            )
        except TooManyBranches as error:
            self._source.lose(session.name, str(error))
            raise
        if _FORMATS[http.path] is responses:
            session.responses[responses.response_id(turn.number)] = turn, request.num_instructions
        try:
            answer = await self._answer(session, turn, request)
            return await _respond(http, request, turn, answer)
        except (asyncio.CancelledError, ConnectionError):
            turn.is_abandoned = True
            raise
        except (EpisodeOver, ValueError):
            turn.is_abandoned = True  # the same request then finds the same turn, which fails again
            session.answers.pop(turn, None)
            raise

    async def _count(self, http: web.Request) -> web.StreamResponse:
        session, body = self._session_of(http), await _json_of(http)
        form, fields = _COUNTS[http.path]
        if form is messages and isinstance(body, dict):
            # Messages requires max_tokens for a turn; a count has none.
            body = {"max_tokens": 1, **body}
        request, _ = session.continued(form.parse(body, self._sampling, "ignore")[0])
        parent, new = session.tree.follows(request.messages, request.tools)
        after = None if parent is None else session.answers[parent].result()
        count = await self._source.count(new, request.tools, after, not session.tree.turns)
        return web.json_response({"input_tokens": count, **fields})

    async def _answer(self, session: Session, turn: ServedTurn, request: ChatRequest) -> ChatAnswer:
        """Return the answer of a turn; sampling continues if the client goes away."""
        if turn not in session.answers:
            session.answers[turn] = asyncio.ensure_future(self._sample(session, turn, request.max_tokens))
        return await asyncio.shield(session.answers[turn])

    async def _sample(self, session: Session, turn: ServedTurn, max_tokens: int | None) -> ChatAnswer:
        answer = await self._source.sample(session.name, turn, max_tokens)
        session.tree.answered(turn, answer.message(turn.number))
        return answer

    def _session_of(self, http: web.Request) -> Session:
        scheme, _, key = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = http.headers.get("x-api-key", "")  # Anthropic's clients send it.
        session = self._sessions.get(key)
        if session is None:
            raise web.HTTPUnauthorized(text="the API key belongs to no open episode")
        return session


async def _json_of(http: web.Request) -> Any:
    try:
        return await http.json()
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None


async def _respond(
    http: web.Request, request: ChatRequest, turn: ServedTurn, answer: ChatAnswer
) -> web.StreamResponse:
    """Write a response here and not by returning it, so that a connection that was lost is noticed."""
    form = _FORMATS[http.path]
    if request.is_streamed:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        for event in form.answer_events(answer, turn.number, request):
            await response.write(event)
    else:
        response = web.json_response(form.answer_body(answer, turn.number, request))
        await response.prepare(http)
    await response.write_eof()
    return response


_STATUS: dict[type[Exception], tuple[int, str]] = {
    # 400 and 403 are not tried again by clients.
    RequestError: (400, "invalid_request_error"),
    EpisodeOver: (403, "episode_over"),
    TooManyBranches: (403, "episode_over"),
    ValueError: (400, "invalid_request_error"),
}


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the form of the API, in one line."""
    form = _FORMATS.get(request.path) or _COUNTS.get(request.path, (chat, {}))[0]
    try:
        return await handler(request)
    except web.HTTPNotFound as error:
        return web.json_response(form.error_body(f"{request.method} {request.path} is not served", "error"), status=error.status)
    except web.HTTPException as error:
        kind = "authentication_error" if error.status == 401 else "error"
        return web.json_response(form.error_body(error.text or error.reason, kind), status=error.status)
    except tuple(_STATUS) as error:
        status, kind = next(_STATUS[base] for base in type(error).__mro__ if base in _STATUS)
        return web.json_response(form.error_body(str(error), kind), status=status)
