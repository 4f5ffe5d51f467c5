"""Sections of episodes: environments and their processes, and how turns are joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_dapo.config.section import (
    CommandWord,
    FunctionPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    is_function_path,
)

Order = Literal["auto", "rounds", "arrival"]


class EnvironmentConfig(Section):
    """Environments: with one, each prompt begins an episode, a conversation of several turns in which the environment
    answers the policy. Its code runs in worker processes, never in the trainer's. `rollout.max_response_tokens` bounds the
    tokens that the policy samples in an episode."""

    path: FunctionPath = ""
    """The user's Environment or ToolEnvironment, as "path/to/file.py:Class" or "package.module:Class". "": none."""

    function: FunctionPath = ""
    """A function `async def rollout(task, client)` that plays an episode, in the same form. "": none."""

    command: tuple[CommandWord, ...] = ()
    """An external program with its arguments that plays episodes in place of a worker: it speaks JSON lines over its standard
    input and output (docs/environments.md). A file is relative to the recipe's directory. []: none."""

    agent: tuple[CommandWord, ...] = ()
    """An agent's program and its arguments, started for each episode. It plays against a chat endpoint, whose address and key
    are in OPENAI_BASE_URL and OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. []: none."""

    other_sampling: Literal["refuse", "ignore"] = "refuse"
    """An agent that wants another temperature or top_p than the rollout's. refuse: its request is an error that says so.
    ignore: it gets the rollout's."""

    max_branches: PositiveInt = 16
    """Most conversations that an agent or a function may begin in an episode: sub-agents, forks, summaries, edited
    histories, questions asked again. Each is a sequence to train. After them the episode is lost."""

    python: str = ""
    """Interpreter of the worker processes, or of an agent that begins with "python", for packages that contradict the
    trainer's. "": the trainer's."""

    processes: NonNegativeInt = 0
    """Worker processes. 0: half of the machine's cores."""

    episodes_per_process: PositiveInt = 16
    """Episodes that a worker process plays at a time; further ones wait. 1 for libraries with global state."""

    max_episodes_per_process: PositiveInt = 1000
    """Episodes after which a worker process is replaced by a new one."""

    max_turns: PositiveInt = 8
    """Turns of the policy in an episode; one that needs more ends truncated after its last answer."""

    max_turn_tokens: NonNegativeInt = 0
    """Longest turn in tokens; a longer one is cut, see turns.on_cut. 0: what is left of the other limits."""

    max_context_tokens: NonNegativeInt = 0
    """Longest context of a turn: the environment's first messages and everything since. 0: data.max_prompt_tokens +
    rollout.max_response_tokens. Raise it if answers are long."""

    reset_seconds: PositiveFloat = 30.0
    """Seconds that an environment may take for its first messages; then its process is killed, and the episode is lost."""

    step_seconds: PositiveFloat = 30.0
    """Seconds that it may take for an answer."""

    episode_seconds: PositiveFloat = 600.0
    """Seconds that it may take for all answers of an episode: then the episode ends truncated, with the answer or without."""

    on_step_timeout: Literal["observe", "end", "lost"] = "observe"
    """A tool that takes longer than step_seconds. observe: the model is told so and continues. end: the
    episode ends without a reward. lost: it is lost."""

    memory_limit_mb: PositiveInt = 2048
    """Memory limit in MiB: of the address space of a worker process, and for each of its episodes of what it and everything it
    has started hold. A worker that holds three quarters of it after an episode is replaced."""

    max_processes: PositiveInt = 64
    """Most processes that a worker process and everything it has started may have at a time."""

    variables: tuple[str, ...] = ()
    """Names of environment variables that worker processes get in addition to PATH, LD_LIBRARY_PATH and the language."""

    success: float = 0.5
    """Sum of an episode's rewards from which on it counts as correct if its environment does not say it."""

    retries: NonNegativeInt = 2
    """Times that a lost environment (its process died, or missed a deadline) is started again with the same seed; then the
    episode is lost, and on_lost applies. A prompt is queued again as many times in a row."""

    resume: Literal["replay", "state", "restart"] = "replay"
    """How an episode continues whose environment was lost, or that a checkpoint holds. replay: the turns so far are played again
    without a new token; if the environment does not repeat them, the episode begins anew. state: the environment's set_state
    gets what its get_state returned after the last answer. restart: the episode begins anew."""

    on_lost: Literal["requeue", "shrink", "fail"] = "requeue"
    """A lost episode is never scored. requeue: its group is dropped and its prompt queued again; a prompt whose groups are lost
    more than `retries` times in a row is left out until the next epoch, with its reason in the log. shrink: the group is trained
    without it if two episodes are left, otherwise requeue. fail: the run ends. It also ends if as many groups in a row as a train
    step has are dropped."""

    order: Order = "auto"
    """rounds: an answer enters in the round of generation after the turn's, which waits for it, so that a run repeats bit for
    bit. arrival: answers enter when they come. auto: rounds with the embedded engine, arrival with servers."""

    @property
    def is_on(self) -> bool:
        return bool(self.path or self.function or self.command or self.agent)

    def broken_rules(self) -> Iterator[Rule]:
        if self.resume == "state" and self.is_on and not self.path:
            yield Rule(
                'environment.resume != "state" or environment.path',
                'set environment.resume = "replay", or write the environment as a class with get_state and set_state',
                path="environment.resume",
                reason="only an Environment has a state that can be saved",
            )
        if sum(map(bool, (self.path, self.function, self.command, self.agent))) > 1:
            yield Rule(
                'len([one for one in (environment.path, environment.function, environment.command, environment.agent) if one]) <= 1',
                "leave all but one of environment.path, environment.function, environment.command and environment.agent out",
                reason="an episode has one environment",
            )
        for name in ("path", "function"):
            if (value := getattr(self, name)) and not is_function_path(value):
                yield Rule(
                    f"is_function_path(environment.{name})",
                    f'set environment.{name} = "path/to/file.py:NAME" or "package.module:NAME"',
                    reason="it does not name code",
                )


class TurnsConfig(Section):
    """How the turns of an episode are joined, and tool calls read, by the model's chat template."""

    history: Literal["refuse", "keep", "rewrite"] = "refuse"
    """A template that renders earlier turns differently once messages follow, e.g. without their thinking. refuse: an
    error at the start of the run that names what it does. keep: episodes keep what was sampled, and the model sees it.
    rewrite: the template's text begins a new sequence; exact, and more tokens."""

    parser: Literal["auto", "hermes", "line", "none"] = "auto"
    """Form of tool calls. hermes: JSON in <tool_call> tags. line: "name: argument" in a line, for small models. none: turns
    call no tools. auto: the form that the chat template writes."""

    on_cut: Literal["end", "observe"] = "end"
    """A turn cut at environment.max_turn_tokens, of which no call is run. end: the episode ends truncated. observe: the
    environment is told and answers. An agent is always told."""
