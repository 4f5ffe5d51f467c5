"""The section [reward]: verifiers, mixtures of verifiers, their processes, and reward shaping terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from megatron_dapo.config.section import (
    FunctionPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Section,
    is_function_path,
)

CodeScore = Literal["all", "share"]
FailureScore = Literal["error"]
# The same as in rewards.verifiers.verifier, which this layer may not import.
VERIFIER_PRESETS = ("dapo", "dapo_boxed", "lenient", "code", "judge", "remote", "reward_model", "format")
GOLD_PRESETS = ("dapo", "dapo_boxed", "lenient")  # presets that compare an answer with a gold answer
# Parts of a reward besides those of a mixture or a user's function.
BUILT_IN_PARTS = ("verifier", "overlong", "perplexity", "format")


def _is_verifier(name: str) -> bool:
    return name in VERIFIER_PRESETS or is_function_path(name)


def _named_function(name: str) -> str:
    """Return the fix for a file without the name of a function, "" for anything else."""
    return f'name its function: "{name}:FUNCTION"' if name.endswith(".py") else ""


class OverlongPunishmentConfig(Section):
    """Soft overlong punishment (DAPO eq. 13): 0 up to max_length - cache_length tokens, falling linearly to -factor at
    max_length."""

    enabled: bool = False
    """Add the punishment to the reward."""

    max_length: PositiveInt = 20480  # the DAPO paper's 16,384 expected tokens and cache of 4,096
    """Response tokens at which the punishment is full. Usually rollout.max_response_tokens."""

    cache_length: PositiveInt = 4096
    """Response tokens over which the punishment grows, ending at max_length."""

    factor: PositiveFloat = 1.0
    """Full punishment as a positive number."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.enabled and not self.max_length > self.cache_length:
            yield Rule(
                "reward.overlong_punishment.max_length > reward.overlong_punishment.cache_length",
                f"set reward.overlong_punishment.cache_length = {max(1, self.max_length // 4)}: it starts at max_length - "
                "cache_length",
                when="reward.overlong_punishment.enabled",
            )


class PerplexityPenaltyConfig(Section):
    """Soft penalty on improbable responses: with n = -mean log-prob of a response's tokens under the policy that
    sampled it, 0 up to n = start, falling linearly to -factor at n = end. It does not bound length, because a mean is
    independent of length: keep the hard limit and overlong_filter. It rewards low entropy, which works against
    clip-higher: watch `actor/entropy`."""

    enabled: bool = False
    """Add the penalty to the reward."""

    start: PositiveFloat = 1.0
    """Nats per token up to which there is no penalty, e.g. the 95 % quantile of correct responses at the first step,
    `quality/nll_correct_p95`."""

    end: PositiveFloat = 1.5
    """Nats per token from which the penalty is full, e.g. the first step's `quality/nll_correct_p995`."""

    low_start: NonNegativeFloat = 0.0
    """Nats per token below which the penalty grows again, until it is full at low_end: loops have a very low
    perplexity. 0: off."""

    low_end: NonNegativeFloat = 0.0
    """Nats per token at which the penalty on loops is full."""

    factor: PositiveFloat = 1.0
    """Full penalty as a positive number."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.enabled and not self.end > self.start:
            yield Rule(
                "reward.perplexity_penalty.end > reward.perplexity_penalty.start",
                f"set reward.perplexity_penalty.end above {self.start}",
                when="reward.perplexity_penalty.enabled",
            )
        if self.enabled and self.low_start > 0 and not self.low_end < self.low_start <= self.start:
            yield Rule(
                "reward.perplexity_penalty.low_end < reward.perplexity_penalty.low_start <= reward.perplexity_penalty.start",
                f"set reward.perplexity_penalty.low_start = 0.0 (off), or low_end below it and it at most {self.start}",
                when="reward.perplexity_penalty.enabled and reward.perplexity_penalty.low_start > 0",
            )


class FormatRewardConfig(Section):
    """Form of a response: either a reward added to the answer's, which does not change the accuracy that groups are
    filtered by, or the verifier "format", by itself or in a mixture."""

    reward: NonNegativeFloat = 0.0
    """Added to the reward of a response that has the form, e.g. 0.5. 0: off."""

    markers: tuple[str, ...] = ()
    """Texts that must occur in this order, each once, e.g. ["<reasoning>", "</reasoning>", "<answer>", "</answer>"].
    Without markers and pattern, a response has the form if it ended by itself and the verifier finds an answer in
    it."""

    pattern: str = ""
    """Regular expression that must match the whole response, e.g. "<think>.*</think>.*"; a dot also matches a line
    break."""


class MixComponentConfig(Section):
    """One component of a mixture: the reward is the sum of weight times score."""

    verifier: str
    """A verifier, written as in reward.verifier."""

    weight: float = 1.0
    """Weight of its score."""

    name: str = ""
    """Its name in samples and metrics, reward/part/NAME. "": the name of the preset or function."""

    decides: bool = False
    """Filter groups by this component's accuracy. If no component decides, the first one does."""


class CodeRewardConfig(Section):
    """Unit tests of the program in a response's last fenced block, run in a sandbox (docs/rewards.md)."""

    tests: str = ""
    """Column with the tests; dots lead into nested fields. "": the gold answer holds them."""

    score: CodeScore = "all"
    """all: reward.correct if every test passes, otherwise reward.incorrect. share: the share of tests that pass."""

    max_tests: NonNegativeInt = 0
    """Number of tests to run, from the first. 0: all."""

    seconds_per_test: PositiveFloat = 5.0
    """CPU seconds per test; wall time may be twice as long. All tests of a response together have
    reward.timeout_seconds less one second, and tests that do not get to run count as failed."""

    memory_limit_mb: PositiveInt = 1024
    """Memory of a program and everything it starts, in MiB."""

    max_processes: PositiveInt = 16
    """Most processes and threads of a program at a time."""

    allow_weak_sandbox: bool = False
    """Run programs even if this site allows neither user namespaces nor Landlock: they can then read and write whatever
    your account can."""


class ServiceConfig(Section):
    """Requests to a service: its address, and the handling of failed requests."""

    url: str = ""
    """URL of the service."""

    key_variable: str = ""
    """Environment variable that holds the key to send as a bearer token; verifier processes get it. "": none."""

    request_seconds: PositiveFloat = 10.0
    """Longest wait for one reply. All attempts together may take reward.timeout_seconds."""

    retries: NonNegativeInt = 3
    """Retries after a failed connection, a reply that is late or not JSON, or status 408, 409, 425, 429 or 5xx. Pauses
    grow from a quarter of a second to 30 s, or follow Retry-After. Any other status fails at once."""

    failure: float | FailureScore = "error"
    """Reward of a response whose request failed; its outcome is error or timeout and it never counts as correct.
    "error": reward.incorrect."""


class JudgeRewardConfig(ServiceConfig):
    """A language model that grades through an OpenAI-compatible endpoint (docs/rewards.md). url ends before
    /chat/completions, e.g. "http://127.0.0.1:8000/v1"."""

    model: str = ""
    """Name of the model in requests. "": "default", which servers with a single model accept."""

    template: str = ""
    """Message to the judge, with {prompt} (the last turn), {messages}, {response}, {answer} and {data_source}. "": grades from 0 to
    10."""

    system_prompt: str = ""
    """System message before it. "": none."""

    score_pattern: str = ""
    """Regular expression whose last match holds the score in its first group. "": Score: NUMBER."""

    score_key: str = ""
    """Key of the score in the last JSON object of the reply, instead of a pattern. "": none."""

    max_score: PositiveFloat = 10.0
    """The score is divided by this."""

    threshold: float = 0.5
    """Divided score from which a response counts as correct."""

    temperature: NonNegativeFloat = 0.0
    """Temperature of the judge's sampling."""

    max_tokens: PositiveInt = 512
    """Length limit of the judge's reply, in tokens."""

    extra_body: dict[str, Any] = {}
    """Further fields of a request under the endpoint's names, e.g. SGLang's { regex = "Score: [0-9]" }, which makes
    every reply have a score."""

    cache_dir: str = ""
    """Directory that caches the judge's replies by request; runs may share it, and it grows without limit. "": none."""


class RemoteRewardConfig(ServiceConfig):
    """A user-provided service that scores batches of responses over HTTP (docs/rewards.md has the JSON)."""


class RewardModelConfig(ServiceConfig):
    """A Hugging Face sequence classifier, loaded by each verifier process or by an SGLang server at url."""

    url: str = ""
    """Server that holds the classifier, e.g. "http://127.0.0.1:30000", started with --is-embedding. "": each verifier process
    loads it."""

    path: str = ""
    """Directory of the classifier, relative to the directory the run is started in. With url, only its tokenizer and
    configuration are read."""

    device: str = ""
    """cpu, cuda or cuda:1. "": cuda if there is a GPU. It shares the GPU with whatever else runs there."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the classifier's weights."""

    label: str = ""
    """Name or number of the output whose probability is the score, for a classifier with several outputs."""

    threshold: float = 0.0
    """Score from which a response counts as correct."""

    max_tokens: PositiveInt = 8192
    """Number of tokens it sees, counted from the end of prompt and response."""


class RewardConfig(Section):
    """The verifier, its worker processes, and reward shaping terms."""

    verifier: FunctionPath = "dapo"
    """Preset dapo (bit-compatible with the published scorer), dapo_boxed (as verl has it since August 2026), lenient
    (math-verify), code (unit tests), judge (a language model), remote (a service), reward_model (a classifier) or format;
    mix for the tables [[reward.mix]]; environment for the rewards of [environment]; or a user's function as
    "package.module:function" or "path/to/file.py:function"."""

    mix: tuple[MixComponentConfig, ...] = ()
    """Components of verifier = "mix", tables [[reward.mix]], each with separate processes."""

    shadow_verifier: FunctionPath = ""
    """A second verifier whose disagreements are logged; it never changes a reward. "": none."""

    answer_format: str = "auto"
    """Form of answer that the prompts request, for the start-up self-test: auto (read from the prompts), answer_line
    ("Answer: ..."), boxed, or a custom template with {answer}."""

    num_workers: PositiveInt = 1
    """Verifier processes. Raise it when the reward phase shows in the step time."""

    timeout_seconds: PositiveFloat = 10.0
    """Seconds one answer may take in a worker before that worker is killed and the outcome is "timeout"."""

    concurrency: PositiveInt = 64
    """Answers that each verifier process works on at a time if the user's function is an `async def`."""

    batch_size: PositiveInt = 16
    """Most responses per call of a function that takes `samples`, and of the presets remote and reward_model."""

    token_ids: bool = False
    """Send the tokens of responses to reward functions, as sample.token_ids, and to the service of the preset
    remote."""

    memory_limit_mb: PositiveInt = 2048
    """Memory limit of one verifier process, in MiB."""

    file_limit_mb: PositiveInt = 256
    """Largest file that a verifier process may write, in MiB."""

    max_processes: PositiveInt = 64
    """Most processes that a verifier process and everything it has started may have at a time. Beyond it, all of them
    are killed and the outcome is "error"."""

    environment: tuple[str, ...] = ()
    """Names of environment variables that verifier processes get in addition to PATH, LD_LIBRARY_PATH and the language.
    A reward function that calls a service may need its key here."""

    correct: float = 1.0
    """Reward of a correct answer."""

    incorrect: float = -1.0
    """Reward of any other answer."""

    overlong_punishment: OverlongPunishmentConfig = OverlongPunishmentConfig()
    """Soft punishment for long responses, added to the reward."""

    perplexity_penalty: PerplexityPenaltyConfig = PerplexityPenaltyConfig()
    """Soft penalty on improbable responses, added to the reward."""

    format: FormatRewardConfig = FormatRewardConfig()
    """Reward for the response's form, added to the reward, and the form that the preset format requires."""

    code: CodeRewardConfig = CodeRewardConfig()
    """Tests and limits of the preset code."""

    judge: JudgeRewardConfig = JudgeRewardConfig()
    """Endpoint, template and scale of the preset judge."""

    remote: RemoteRewardConfig = RemoteRewardConfig()
    """Service of the preset remote."""

    reward_model: RewardModelConfig = RewardModelConfig()
    """Classifier of the preset reward_model."""

    overlong_filter: bool = False
    """Leave truncated responses out of the loss (and their tokens out of the denominator). Not the same as the
    punishment."""

    allow_overlong_filter_and_punishment: bool = False
    """Allow overlong_filter together with overlong_punishment, although the punishment then never affects truncated
    responses."""

    def broken_rules(self) -> Iterator[Rule]:
        if self.overlong_filter and self.overlong_punishment.enabled and not self.allow_overlong_filter_and_punishment:
            yield Rule(
                "not (reward.overlong_filter and reward.overlong_punishment.enabled) or "
                "reward.allow_overlong_filter_and_punishment",
                "switch one of them off, or set reward.allow_overlong_filter_and_punishment = true",
                reason="filtered responses never feel the punishment",
                path="reward.overlong_filter",
            )
        presets = {"verifier_presets": VERIFIER_PRESETS}
        if self.verifier not in ("mix", "environment") and not _is_verifier(self.verifier):
            yield Rule(
                'reward.verifier in ("mix", "environment") or reward.verifier in verifier_presets or '
                "is_function_path(reward.verifier)",
                _named_function(self.verifier) or 'set reward.verifier = "dapo"',
                reason="it is no preset, mix, environment, package.module:function or path/to/file.py:function",
                values=presets,
            )
        if self.shadow_verifier and not _is_verifier(self.shadow_verifier):
            yield Rule(
                "reward.shadow_verifier in verifier_presets or is_function_path(reward.shadow_verifier)",
                _named_function(self.shadow_verifier) or 'set reward.shadow_verifier = "dapo"',
                when='reward.shadow_verifier != ""',
                reason="it is no preset, package.module:function or path/to/file.py:function",
                values=presets,
            )
        if self.shadow_verifier and self.verifier == "environment":
            yield Rule(
                'reward.verifier != "environment" or reward.shadow_verifier == ""',
                'set reward.shadow_verifier = ""',
                reason="an environment's rewards are compared with no verifier's",
            )
        if self.shadow_verifier == self.verifier:
            yield Rule(
                "reward.shadow_verifier != reward.verifier", 'set reward.shadow_verifier = "" or another verifier'
            )
        if not self.correct > self.incorrect:
            yield Rule("reward.correct > reward.incorrect", "set reward.correct = 1.0 and reward.incorrect = -1.0")
        yield from self._broken_rules_of_mix()
        if "code" in self.verifiers:
            yield from self._broken_rules_of_code()
        yield from self._broken_rules_of_services()
        yield from self._broken_rules_of_format()

    def _broken_rules_of_mix(self) -> Iterator[Rule]:
        if (self.verifier == "mix") != bool(self.mix):
            yield Rule(
                '(reward.verifier == "mix") == (reward.mix != ())',
                'set reward.verifier = "mix" if there are tables [[reward.mix]], and only then',
                reason="the tables are the components of that verifier",
            )
        if not all(_is_verifier(one.verifier) for one in self.mix):
            yield Rule(
                "not [one.verifier for one in reward.mix if not (one.verifier in verifier_presets or is_function_path(one.verifier))]",
                "give every table of reward.mix a verifier: a preset, package.module:function, or path/to/file.py:function",
                values={"verifier_presets": VERIFIER_PRESETS},
            )
        if len(set(self.part_names)) != len(self.mix):
            yield Rule(
                "len(set(reward.part_names)) == len(reward.mix)",
                "give the tables of reward.mix different names: name = ...",
                reason="each is a part of the reward in the metrics",
            )
        # The preset `format` is refused if the recipe also adds a format reward.
        taken = set(BUILT_IN_PARTS) - ({"format"} & set(self.verifiers))
        if taken & set(self.part_names):
            yield Rule(
                'not [name for name in reward.part_names if name in built_in_parts and (name != "format" or "format" not in reward.verifiers)]',
                f"give the tables of reward.mix other names than {', '.join(BUILT_IN_PARTS)}: name = ...",
                reason="those are parts of every reward",
                values={"built_in_parts": BUILT_IN_PARTS},
            )
        if any(one.weight == 0 for one in self.mix):
            yield Rule(
                "not [one for one in reward.mix if one.weight == 0]",
                "give every table of reward.mix a weight other than 0, or leave it out",
            )
        if sum(one.decides for one in self.mix) > 1:
            yield Rule(
                "len([one for one in reward.mix if one.decides]) <= 1",
                "set decides = true in one table of reward.mix at most",
                reason="groups are filtered by one answer to whether a response is right",
            )

    def _broken_rules_of_code(self) -> Iterator[Rule]:
        code, is_used = self.code, '"code" in reward.verifiers'
        if not self.timeout_seconds > 1 + code.seconds_per_test:
            yield Rule(
                "reward.timeout_seconds > 1 + reward.code.seconds_per_test",
                f"set reward.timeout_seconds = {4 * code.seconds_per_test + 1}",
                when=is_used,
                reason="all tests of a response together have one second less",
            )
        if code.memory_limit_mb > self.memory_limit_mb:
            yield Rule(
                "reward.code.memory_limit_mb <= reward.memory_limit_mb",
                f"set reward.code.memory_limit_mb = {self.memory_limit_mb}, or raise reward.memory_limit_mb",
                when=is_used,
                reason="a program is a child of a verifier process",
            )
        if code.max_processes + 4 > self.max_processes:
            yield Rule(
                "reward.code.max_processes + 4 <= reward.max_processes",
                f"set reward.max_processes = {code.max_processes + 4}",
                when=is_used,
                reason="a program is a child of a verifier process, and its sandbox adds three",
            )

    def _broken_rules_of_services(self) -> Iterator[Rule]:
        services: dict[str, ServiceConfig] = {
            name: getattr(self, name) for name in ("judge", "remote", "reward_model") if name in self.verifiers
        }
        expected = {
            "judge": 'an OpenAI-compatible endpoint, e.g. "http://127.0.0.1:8000/v1"',
            "remote": 'the service that scores responses, e.g. "http://127.0.0.1:8000/score"',
            "reward_model": 'an SGLang server of the classifier, e.g. "http://127.0.0.1:30000", or to ""',
        }
        for name, service in services.items():
            # Without a server, each verifier process loads the classifier.
            when = f'"{name}" in reward.verifiers' + (" and reward.reward_model.url" if name == "reward_model" else "")
            if not service.url.startswith("http") and (service.url or name != "reward_model"):
                fix = f"set reward.{name}.url to {expected[name]}"
                yield Rule(f'reward.{name}.url.startswith("http")', fix, when=when)
            if service.url and service.request_seconds > self.timeout_seconds:
                yield Rule(
                    f"reward.{name}.request_seconds <= reward.timeout_seconds",
                    f"set reward.timeout_seconds = {service.request_seconds * (1 + service.retries)}",
                    when=f'"{name}" in reward.verifiers and reward.{name}.url',
                    reason="all attempts of a request together have that long",
                )
        if self.judge.score_key and self.judge.score_pattern:
            yield Rule(
                'reward.judge.score_key == "" or reward.judge.score_pattern == ""',
                "leave reward.judge.score_key or reward.judge.score_pattern out",
                reason="a score is read in one way",
            )
        if "reward_model" in services and not self.reward_model.path:
            yield Rule(
                'reward.reward_model.path != ""',
                "set reward.reward_model.path to the directory of a sequence classifier",
                when='"reward_model" in reward.verifiers',
            )

    def _broken_rules_of_format(self) -> Iterator[Rule]:
        if "format" not in self.verifiers:
            return
        if not self.format.markers and not self.format.pattern:
            yield Rule(
                'reward.format.markers != () or reward.format.pattern != ""',
                "set reward.format.markers or reward.format.pattern",
                when='"format" in reward.verifiers',
            )
        if self.format.reward != 0:
            yield Rule(
                'reward.format.reward == 0 or "format" not in reward.verifiers',
                "set reward.format.reward = 0.0, or leave the verifier format out",
                reason="the form would be rewarded twice",
            )

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Verifiers that score training responses: one, or one per component of the mixture."""
        return tuple(one.verifier for one in self.mix) if self.verifier == "mix" else (self.verifier,)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the mixture's components in metrics and samples."""
        return tuple(one.name or one.verifier.rpartition(":")[2] for one in self.mix)

    @property
    def num_processes(self) -> int:
        """Verifier processes of all components, without those of a shadow verifier."""
        return self.num_workers * len(self.verifiers)
