"""Data of a step: one frozen dataclass per hop.

    Prompt -> GenerationRequest -> Completion -> ScoredSample -> Group -> TrainSample -> MicroBatch

Token in, token out: text is never tokenized a second time, and every response token knows the policy version
that sampled it. Shapes use T for the tokens of one sequence (prompt + response), R for its response tokens,
P for the padded tokens of one packed micro-batch and N for its number of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]
Outcome = Literal["correct", "wrong", "unparsable", "timeout", "truncated", "error", "unfinished"]
CallStatus = Literal["ok", "unparsable", "unknown_tool", "bad_arguments", "error", "timeout", "refused"]
# "abort", and "window" at the end of a window: it continues.
EpisodeEnd = Literal["done", "max_turns", "max_tokens", "max_context", "length", "seconds", "lost", "abort", "window"]
# Dynamic sampling's decision on a group. "unscored": a verifier process was lost, whatever the filter.
FilterDecision = Literal["kept", "all_wrong", "all_right", "rejected", "unscored"]
IS_LOST = "is_lost"  # key in a score's details: the machine, not the response, prevented the score


@dataclass(frozen=True)
class Prompt:
    """One problem of the data set with the chat template applied, ready for generation."""

    prompt_id: str  # hash of (messages, answer): equal problems have equal ids
    messages: tuple[Mapping[str, str], ...]  # chat turns: {"role": ..., "content": ...}
    token_ids: tuple[int, ...]
    answer: str  # gold answer, already validated
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # JSON-serializable
    source: str = ""  # name in data.sources or data.eval_paths, for metrics; "": the rows' own data_source
    begins_episode: bool = False  # it is played with an environment

    @property
    def source_name(self) -> str:
        """Name of its data source, by which teachers are chosen."""
        return self.source or self.data_source

    @property
    def task(self) -> Mapping[str, Any] | None:
        """What an environment begins from: the other columns of the prompt's row, its messages and its answer."""
        if not self.begins_episode:
            return None
        return {**self.extra, "messages": [dict(message) for message in self.messages], "answer": self.answer}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    # The completion then has each token's support, and log-probs renormalized over it. Needs a top_k above 1.
    with_support: bool = False


@dataclass(frozen=True)
class RoutingShape:
    """Sizes of a mixture-of-experts model's routing; layers without experts count too."""

    num_layers: int
    experts_per_token: int
    num_experts: int

    @property
    def dtype(self) -> type[np.generic]:
        """Smallest integer type for expert numbers that torch can index and send."""
        return np.uint8 if self.num_experts <= 256 else np.int16


@dataclass(frozen=True)
class VersionRange:
    """Response tokens [start, end) were sampled by policy `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class TurnCall:
    """A tool call that a turn made, for metrics and people; the model saw its text."""

    name: str
    status: CallStatus
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Turn:
    """A turn of the policy and the answer to it: tokens [start, end) were sampled, [end, observed_end) were not."""

    start: int
    end: int
    observed_end: int
    finish_reason: FinishReason = "stop"  # "length": the turn was cut, and nothing in it was executed
    reward: float = 0.0  # reward at its end
    trained: bool = True  # False: another model's, or not to be learned from
    calls: tuple[TurnCall, ...] = ()
    order: int = 0  # number among the turns of the episode, whose streams may take turns


@dataclass(frozen=True)
class TokenRun:
    """Tokens [start, end) of a stream of one kind."""

    start: int
    end: int
    is_sampled: bool  # False: the environment's text
    is_trained: bool  # sampled, and the policy learns from it


def token_runs(num_tokens: int, turns: Iterable[Turn] | None) -> list[TokenRun]:
    """Return the runs that cover [0, num_tokens): sampled in turns, observed between them; without turns all sampled."""
    if turns is None:
        return [TokenRun(0, num_tokens, True, True)] if num_tokens else []
    runs: list[TokenRun] = []
    position = 0
    for turn in turns:
        if not position <= turn.start <= turn.end <= turn.observed_end <= num_tokens:
            raise ValueError(f"turn [{turn.start}, {turn.end}, {turn.observed_end}) of a stream of {num_tokens} tokens")
        runs += [
            TokenRun(position, turn.start, False, False),
            TokenRun(turn.start, turn.end, True, turn.trained),
            TokenRun(turn.end, turn.observed_end, False, False),
        ]
        position = turn.observed_end
    runs.append(TokenRun(position, num_tokens, False, False))
    return [run for run in runs if run.end > run.start]


@dataclass(frozen=True)
class Tokens:
    """Ids and log-probs of tokens that an engine sampled."""

    token_ids: np.ndarray  # [N] int32
    logprobs: np.ndarray  # [N] float32


def _sampled(token_ids: np.ndarray, logprobs: np.ndarray, runs: list[TokenRun]) -> Tokens:
    """Return the sampled tokens of a stream; the arrays themselves if all are."""
    sampled = [run for run in runs if run.is_sampled]
    if sum(run.end - run.start for run in sampled) == len(token_ids):
        return Tokens(token_ids, logprobs)
    ids, numbers = (
        np.concatenate([array[:0], *(array[run.start : run.end] for run in sampled)]) for array in (token_ids, logprobs)
    )
    return Tokens(ids, numbers)


@dataclass(frozen=True, eq=False)
class Segment:
    """A token stream of an episode that does not extend another one: a branch, a sub-agent, a compacted history."""

    prompt_ids: tuple[int, ...]  # context at its begin; tokens in it that were sampled elsewhere are trained there
    token_ids: np.ndarray  # [R] int32
    logprobs: np.ndarray  # [R] float32
    versions: tuple[VersionRange, ...]
    turns: tuple[Turn, ...]
    parent: int = 0  # segment from which it came; 0: the main stream
    reason: str = ""  # reason it does not extend that one
    routing: np.ndarray | None = None  # see Completion
    support: np.ndarray | None = None  # see Completion

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, np.int32))
        object.__setattr__(self, "logprobs", np.asarray(self.logprobs, np.float32))
        if self.support is not None:
            object.__setattr__(self, "support", np.asarray(self.support, np.int32))

    def __eq__(self, other: object) -> bool:
        return _equal(self, other) if isinstance(other, Segment) else NotImplemented

    @property
    def runs(self) -> list[TokenRun]:
        return token_runs(len(self.token_ids), self.turns)

    @property
    def sampled(self) -> Tokens:
        return _sampled(self.token_ids, self.logprobs, self.runs)


@dataclass(frozen=True)
class Episode:
    """A conversation of the policy with an environment, of which a completion holds the main stream."""

    end: EpisodeEnd
    turns: tuple[Turn, ...]  # turns of the completion's tokens
    segments: tuple[Segment, ...] = ()  # other streams, numbered from 1
    reward: float | None = None  # the environment's; None: the verifier's counts
    is_correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # reward parts, for metrics
    figures: Mapping[str, float] = field(default_factory=dict)  # numbers that the environment recorded; means go to the metrics
    attempt: int = 0  # times it began anew, because its environment did not repeat its answers
    num_retries: int = field(default=0, compare=False)  # times a lost environment was started again
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)  # generating, acting
    lost: str = ""  # the reason, if its end is "lost"
    state: str = ""  # JSON, of an unfinished episode with environment.resume = "state"


@dataclass(frozen=True, eq=False)
class Completion:
    """An engine's response: ids and log-probs at the sampled temperature, one per response token.

    With an `episode`, only the tokens of its turns were sampled. The environment's, between them, have a version (that
    of the turn before) and a log-prob that nothing reads: use `sampled`, `num_sampled` and `runs`.

    Both arrays stay arrays from the engine to the loss, at 8 bytes per token, and are read-only by convention. Other sequences
    of numbers are converted. Equal completions have equal fields, bit for bit.

    `routing` has the experts that every layer chose for each token that the engine read, including the prompt: all T
    tokens of the sequence but the last. In a continued response, each token has those of the pass that sampled it.
    `support` has the ids that each token was drawn from under top-p and top-k, in the form of `token_support`; its
    log-probs are then renormalized over them.
    """

    request_id: str
    token_ids: np.ndarray  # [R] int32, including the stop token
    logprobs: np.ndarray  # [R] float32
    finish_reason: FinishReason
    versions: tuple[VersionRange, ...]  # cover [0, R) without gaps
    routing: np.ndarray | None = None  # [T - 1, layers, experts per token] uint8 or int16; None: not requested
    support: np.ndarray | None = None  # [M] int32, flat; None: not requested
    prompt_ids: tuple[int, ...] | None = None  # an episode's own first tokens; None: the group's prompt
    episode: Episode | None = None  # None: one turn

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, np.int32))
        object.__setattr__(self, "logprobs", np.asarray(self.logprobs, np.float32))
        if self.support is not None:
            object.__setattr__(self, "support", np.asarray(self.support, np.int32))

    def __eq__(self, other: object) -> bool:
        return _equal(self, other) if isinstance(other, Completion) else NotImplemented

    @property
    def num_tokens(self) -> int:
        """Response tokens so far, including an environment's."""
        return len(self.token_ids)

    @property
    def runs(self) -> list[TokenRun]:
        """Runs of sampled and observed tokens that cover the response."""
        return token_runs(len(self.token_ids), None if self.episode is None else self.episode.turns)

    @property
    def sampled(self) -> Tokens:
        """The sampled tokens of all streams, without an environment's; the completion's arrays if it has one turn."""
        parts = [_sampled(self.token_ids, self.logprobs, self.runs)]
        if not self.num_segments:
            return parts[0]
        parts += [segment.sampled for segment in self.episode.segments] if self.episode is not None else []
        return Tokens(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("token_ids", "logprobs")))

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled so far, in all streams."""
        return sum(
            run.end - run.start
            for segment in range(1 + self.num_segments)
            for run in self.stream(segment).runs
            if run.is_sampled
        )

    @property
    def last_turn(self) -> np.ndarray:
        """Ids of the last turn, which verifiers read; of a response with one turn, all of them."""
        if self.episode is None:
            return self.token_ids
        for segment, turn in reversed(self.ordered_turns):
            return self.stream(segment).token_ids[turn.start : turn.end]
        return self.token_ids[:0]

    @property
    def ordered_turns(self) -> list[tuple[int, Turn]]:
        """Turns of all streams of the episode with the numbers of their streams, in the order in which they were sampled."""
        assert self.episode is not None, f"{self.request_id} is no episode"
        streams = (self.episode.turns, *(segment.turns for segment in self.episode.segments))
        turns = [(number, turn) for number, stream in enumerate(streams) for turn in stream]
        return sorted(turns, key=lambda pair: pair[1].order)

    @property
    def num_segments(self) -> int:
        """Streams besides the main one."""
        return 0 if self.episode is None else len(self.episode.segments)

    def stream(self, segment: int) -> Completion | Segment:
        """Return a stream by its number: 0 is the completion's own, a sequence to train like each segment."""
        if not segment:
            return self
        assert self.episode is not None, f"a response of one turn has no segment {segment}"
        return self.episode.segments[segment - 1]

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason != "stop"


def _equal(one: Completion | Segment, other: Completion | Segment) -> bool:
    """Compare field by field, arrays bit for bit."""
    pairs = [(getattr(one, entry.name), getattr(other, entry.name)) for entry in fields(one)]
    return all(
        _bits(first) == _bits(second) if isinstance(first, np.ndarray) or isinstance(second, np.ndarray) else first == second
        for first, second in pairs
    )


def _bits(numbers: np.ndarray | None) -> bytes | None:
    return None if numbers is None else numbers.tobytes()


def num_distinct(completions: Iterable[Completion]) -> int:
    """Return the number of responses with different tokens."""
    return len({completion.sampled.token_ids.tobytes() for completion in completions})


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample. Its random numbers depend only on `seed` and the position, not on the batch it runs in.

    With `prefix` (an aborted completion of the same request), the engine recomputes the keys and values of its tokens,
    continues after them, and returns the whole response: the prefix with its log-probs and versions, then new tokens.
    `sampling.max_new_tokens` bounds the whole response.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    prefix: Completion | None = None
    with_routing: bool = False  # the completion then has the chosen experts
    task: Mapping[str, Any] | None = None  # JSON: an environment's task; the completion then holds an episode
    # An episode comes back unfinished with that many sampled tokens, at a turn's end with the answer; 0: only at its end.
    window_end: int = 0
    affinity: tuple[str, ...] = ()  # requests that share one go to one server if loads allow, the first before others


@dataclass(frozen=True)
class Score:
    """A verifier's score of one response. `accuracy` drives dynamic sampling, `reward` the advantage."""

    accuracy: float  # 0 or 1
    reward: float  # the verifier's own scale, e.g. +1 / -1
    outcome: Outcome
    extracted: str | None = None  # the answer found in the response
    detail: Mapping[str, Any] = field(default_factory=dict)  # JSON-serializable

    @property
    def is_lost(self) -> bool:
        """True if the machine prevented the verdict, in a mixture any component's: the reward says nothing."""
        components = self.detail.get("components", {}).values()
        return any(detail.get(IS_LOST, False) for detail in (self.detail, *components))

    @property
    def failure(self) -> str:
        """Why the reward timed out or failed, in a mixture any component's; "" if it did not."""
        if self.outcome in ("timeout", "error"):
            return str(self.detail.get("error", self.outcome))
        return "; ".join(f"{name}: {reason}" for name, reason in self.detail.get("failed", {}).items())


@dataclass(frozen=True)
class Window:
    """The part of a response from one generation step (T-PPO, arXiv 2506.15050): its tokens from `start` on."""

    start: int = 0
    is_finished: bool = True  # the response ended in it, or must not continue
    segment_starts: tuple[int, ...] = ()  # an episode's segments have theirs; one that began in the window has none

    def __post_init__(self) -> None:
        object.__setattr__(self, "segment_starts", tuple(self.segment_starts))

    def start_of(self, segment: int) -> int:
        """Return the first token of the window in a stream of the response."""
        starts = (self.start, *self.segment_starts)
        return starts[segment] if segment < len(starts) else 0


@dataclass(frozen=True)
class Repetition:
    """Signs that a response repeats itself, from its token ids; see `rewards.pool.repetition`."""

    ngram: float = 0.0  # share of its 20-grams that are copies
    loop_period: int = 0  # it ends in `loop_repeats` copies of its last `loop_period` tokens; 0, 0: it does not loop
    loop_repeats: int = 0
    zlib_ratio: float = 1.0  # compressed / raw bytes; low is repetitive, a very short response is above 1


VERIFIER_PART = "verifier"  # name of the verifier's reward among the parts of a sample's


@dataclass(frozen=True)
class ScoredSample:
    """A response with its score and the parts that add up to its total reward.

    With a window, the completion holds all tokens up to the window's end. If the response continues after it, the score
    is 0 with outcome "unfinished", and there are no reward parts.
    """

    sample_id: str  # "<group_id>/<index in group>"
    completion: Completion
    text: str  # decoded response, for people and verifiers only
    score: Score
    reward_parts: Mapping[str, float]  # e.g. {"verifier": 1.0, "overlong": -0.25}
    window: Window = Window()
    repetition: Repetition = Repetition()

    @property
    def reward(self) -> float:
        return sum(self.reward_parts.values())

    @property
    def rewards(self) -> Mapping[str, float]:
        """The rewards by name: the reward parts, but the verifier's as its own parts if they add up to it."""
        own = self.score.detail.get("parts", {})
        if not own or not math.isclose(sum(own.values()), self.reward_parts.get(VERIFIER_PART, math.nan), abs_tol=1e-9):
            return self.reward_parts
        return {**own, **{name: value for name, value in self.reward_parts.items() if name != VERIFIER_PART}}


@dataclass(frozen=True)
class Group:
    """All responses to one visit of one prompt. Never split by the buffer."""

    group_id: str
    prompt: Prompt
    samples: tuple[ScoredSample, ...]  # G; with windows, only those that this generation step worked on
    policy_version: int  # the oldest version that sampled a token of it
    generation_step: int


@dataclass(frozen=True)
class TurnCredit:
    """A turn of a sequence, for its advantages: response tokens [start, end), and what they earned."""

    start: int
    end: int
    reward: float  # the environment's, if it rewards the episode
    context: int  # hash of the tokens before it
    order: int = 0  # number among the turns of the episode


@dataclass(frozen=True)
class CriticContext:
    """Facts about a response that advantages need in addition to its tokens."""

    reward: float  # total, those of the turns included; 0 if the response continues
    is_correct: bool
    window: Window
    turns: tuple[TurnCredit, ...] = ()  # turns of the sequence
    rewards: Mapping[str, float] = field(default_factory=dict)  # name -> reward; their sum is `reward`


@dataclass(frozen=True)
class TrainSample:
    """One sequence as the trainer sees it. Response token j is tokens[prompt_length + j]."""

    sample_id: str  # an episode's segments: "<sample_id of the episode>#<segment>"
    group_index: int  # index of its group within the rollout batch
    # [T] int32. Tokens, log-probs, routing and support have no memory on ranks that do not pack the sample.
    tokens: torch.Tensor
    prompt_length: int
    loss_mask: torch.Tensor  # [R] float32, 1 if the token is trained
    advantages: torch.Tensor  # [R] float32
    rollout_logprobs: torch.Tensor  # [R] float32, from the engine
    staleness: torch.Tensor | None = None  # [R] float32, policy versions behind the trained one; None: 0 everywhere
    critic_context: CriticContext | None = None  # set if advantages come from a critic
    values: torch.Tensor | None = None  # [R] float32, the critic's values of the states in which tokens were drawn
    value_after: float = 0.0  # the critic's value of the state after the last token
    returns: torch.Tensor | None = None  # [R] float32, the critic's targets
    kl_penalties: torch.Tensor | None = None  # [R] float32, subtracted from the tokens' rewards; None: 0 everywhere
    positive_weight: float = 0.0  # weight of each trained token's -log pi in the optimizer step's loss (VAPO, Eq 9)
    routing: torch.Tensor | None = None  # [T - 1, layers, experts per token], see Completion; None: not replayed
    support: torch.Tensor | None = None  # [M] int32, see Completion; None: sampled from the whole vocabulary
    observed: torch.Tensor | None = None  # [R] bool: an environment's tokens, never trained; None: all were sampled
    segment: int = 0  # stream of its episode; 0: the main one, or the only one
    source: str = ""  # data source of its prompt
    # [R] float32, the weighted sum of log pi_teacher - log pi over the servers that teach it; None: no server does.
    teacher_gains: torch.Tensor | None = None
    # [Q] int32, prompts of the teachers that read another one, see `data.teacher_prompts`; None: all read the policy's.
    teacher_prompts: torch.Tensor | None = None

    @property
    def episode(self) -> str:
        """Name of the episode, or of the only response, that the sequence is a part of."""
        return self.sample_id.rpartition("#")[0] if self.segment else self.sample_id

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.numel())

    @property
    def num_response_tokens(self) -> int:
        return self.num_tokens - self.prompt_length

    @property
    def num_sampled(self) -> int:
        """Response tokens without an environment's."""
        return self.num_response_tokens - (0 if self.observed is None else int(self.observed.sum()))


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences of one micro-batch of one data-parallel rank (before context-parallel slicing).

    Every per-token field is aligned with the position that PREDICTS the token: position t holds the fields of
    targets[t] = tokens[t + 1]. Padding and prompt positions have loss_mask 0. Each sequence is padded to a multiple of the
    layout's alignment, so `cu_seqlens` counts padded lengths; `sequence_lengths` are the true ones.
    """

    token_ids: torch.Tensor  # [P] int64
    position_ids: torch.Tensor  # [P] int64, restart at 0 in every sequence
    targets: torch.Tensor  # [P] int64, 0 at prompt and padding positions
    cu_seqlens: torch.Tensor  # [N + 1] int32
    sequence_lengths: tuple[int, ...]  # N true lengths
    sequence_ids: torch.Tensor  # [P] int64, index of the sequence within this micro-batch
    loss_mask: torch.Tensor  # [P] float32
    loss_weights: torch.Tensor  # [P] float32: the optimizer step's loss is the sum of loss_weights * token loss
    advantages: torch.Tensor  # [P] float32
    rollout_logprobs: torch.Tensor  # [P] float32
    sample_ids: tuple[str, ...]  # N
    staleness: torch.Tensor | None = None  # [P] float32, see TrainSample; None: 0 everywhere
    values: torch.Tensor | None = None  # [P] float32; this and the next two are 0 at positions without a critic's value
    returns: torch.Tensor | None = None  # [P] float32
    positive_weights: torch.Tensor | None = None  # [P] float32
    response_positions: torch.Tensor | None = None  # [R] int64, ascending: they predict response tokens; None: all
    routing: torch.Tensor | None = None  # [P, layers, experts per token], the engine's; None: the router's
    is_routed: torch.Tensor | None = None  # [P] bool: `routing` applies; not padding or last tokens
    support: torch.Tensor | None = None  # [P, K] int32: the ids each target was drawn from, then -1; None: all ids for all

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())
