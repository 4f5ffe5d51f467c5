"""The section [reward]: verifiers, mixtures of them, their processes, and what is added to their word."""

from __future__ import annotations

from typing import Any, Literal

from megatron_dapo.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

CodeScore = Literal["all", "share"]
FailureScore = Literal["error"]


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


class PerplexityPenaltyConfig(Section):
    """Soft penalty of improbable responses: with n = -mean log-prob of a response's tokens under the policy that sampled it, 0 up to
    n = start, falling linearly to -factor at n = end. It does not bound length, as a mean takes length out: keep the hard
    limit and overlong_filter. It rewards low entropy, against clip-higher: watch `actor/entropy`."""

    enabled: bool = False
    """Add the penalty to the reward."""

    start: PositiveFloat = 1.0
    """Nats a token up to which nothing is taken off. For example the 95 % quantile of correct responses at the first step,
    `quality/nll_correct_p95`."""

    end: PositiveFloat = 1.5
    """Nats a token from which the penalty is full, e.g. the first step's `quality/nll_correct_p995`."""

    low_start: NonNegativeFloat = 0.0
    """Nats a token below which it grows again, to be full at low_end: loops have a very low perplexity. 0: off."""

    low_end: NonNegativeFloat = 0.0
    """Nats a token at which the penalty of loops is full."""

    factor: PositiveFloat = 1.0
    """Full penalty as a positive number."""


class FormatRewardConfig(Section):
    """Form of a response: a reward added to that of its answer, which leaves the accuracy that groups are filtered by alone, or the
    verifier "format", alone or in a mixture."""

    reward: NonNegativeFloat = 0.0
    """Added where the form holds, e.g. 0.5. 0: off."""

    markers: tuple[str, ...] = ()
    """Texts that have to occur in this order, each once, e.g. ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]. Without
    markers and pattern the form holds where the verifier finds an answer in a response that ended by itself."""

    pattern: str = ""
    """Regular expression that has to match the whole response, e.g. "<think>.*</think>.*"; a dot also stands for a line break."""


class MixComponentConfig(Section):
    """One component of a mixture: the reward is the sum of weight times score."""

    verifier: str
    """As reward.verifier."""

    weight: float = 1.0
    """Factor of its score."""

    name: str = ""
    """Its part in samples and metrics, reward/part/NAME. "": the preset's or the function's."""

    decides: bool = False
    """Groups are filtered by whether this component calls responses right. Without any the first one decides."""


class CodeRewardConfig(Section):
    """Unit tests of the program in a response's last fenced block, in a sandbox (docs/rewards.md)."""

    tests: str = ""
    """Column of the tests; dots lead into nested fields. "": the gold answer holds them."""

    score: CodeScore = "all"
    """all: reward.correct where every test passes, else reward.incorrect. share: the share of tests that pass."""

    max_tests: NonNegativeInt = 0
    """Tests that count, from the first. 0: all."""

    seconds_per_test: PositiveFloat = 5.0
    """Processor time of a test; by the clock it may take twice as long. All tests of a response together have
    reward.timeout_seconds less one second, and those that get no turn have failed."""

    memory_limit_mb: PositiveInt = 1024
    """Memory of a program and all that it starts, in MiB."""

    max_processes: PositiveInt = 16
    """Processes and threads of a program at a time."""

    allow_weak_sandbox: bool = False
    """Run programs even where this site allows neither user namespaces nor Landlock: they then can read and write what your account
    can."""


class ServiceConfig(Section):
    """Requests to a service: where, and what happens to those that fail."""

    url: str = ""
    """URL that requests are sent to."""

    key_variable: str = ""
    """Environment variable with the key that goes as a bearer token; verifier processes get it. "": none."""

    request_seconds: PositiveFloat = 10.0
    """Longest wait for one reply. All attempts together have reward.timeout_seconds."""

    retries: NonNegativeInt = 3
    """Further attempts after no connection, no reply in time, status 408, 409, 425, 429 or 5xx, or a reply that is no JSON, with
    growing pauses from a quarter of a second to 30 s, or those of Retry-After. Any other status fails at once."""

    failure: float | FailureScore = "error"
    """Reward of a response whose request failed; its outcome is error or timeout and it is never right. "error":
    reward.incorrect."""


class JudgeRewardConfig(ServiceConfig):
    """A language model that grades, behind an OpenAI-compatible endpoint (docs/rewards.md). url ends before /chat/completions, e.g.
    "http://127.0.0.1:8000/v1"."""

    model: str = ""
    """Name of the model in requests. "": default, which servers of one model take."""

    template: str = ""
    """Message to the judge, with {prompt} (the last turn), {messages}, {response}, {answer} and {data_source}. "": grades from 0 to
    10."""

    system_prompt: str = ""
    """System message in front. "": none."""

    score_pattern: str = ""
    """Regular expression whose last match has the score in its first group. "": Score: NUMBER."""

    score_key: str = ""
    """Key of the score in the last JSON object of the reply, instead of a pattern. "": none."""

    max_score: PositiveFloat = 10.0
    """Divisor of the score."""

    threshold: float = 0.5
    """Divided score from which a response counts as right."""

    temperature: NonNegativeFloat = 0.0
    """Temperature of the judge's sampling."""

    max_tokens: PositiveInt = 512
    """Length limit of the judge's reply, in tokens."""

    extra_body: dict[str, Any] = {}
    """Further fields of a request, as the endpoint names them, e.g. { regex = "Score: [0-9]" } of SGLang, so that every reply has a
    score."""

    cache_dir: str = ""
    """Directory of the judge's replies by request; runs may share it, and it grows without a limit. "": none."""


class RemoteRewardConfig(ServiceConfig):
    """A service of your own that scores batches of responses over HTTP (docs/rewards.md has the JSON)."""


class RewardModelConfig(ServiceConfig):
    """A Hugging Face sequence classifier, which each verifier process loads, or which an SGLang server at url has loaded."""

    url: str = ""
    """Server that holds the classifier, e.g. "http://127.0.0.1:30000", started with --is-embedding. "": each verifier process
    loads it."""

    path: str = ""
    """Its directory, relative to the one that the run is started in. With url its tokenizer and configuration alone are read."""

    device: str = ""
    """cpu, cuda or cuda:1. "": cuda where there is one. It shares a GPU with whatever else is there."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of its weights."""

    label: str = ""
    """Name or number of the output whose probability is the score, of a classifier with several."""

    threshold: float = 0.0
    """Score from which a response counts as right."""

    max_tokens: PositiveInt = 8192
    """Last tokens of prompt and response that it sees."""


class RewardConfig(Section):
    """The verifier, the processes it runs in, and what is added to its word."""

    verifier: str = "dapo"
    """Preset dapo (bit-compatible with the published scorer), lenient (math-verify), code (unit tests), judge (a language model),
    remote (a service), reward_model (a classifier) or format; mix for the tables [[reward.mix]]; or a user's function as
    "package.module:function" or "path/to/file.py:function"."""

    mix: tuple[MixComponentConfig, ...] = ()
    """Components of verifier = "mix", tables [[reward.mix]], each with processes of its own."""

    shadow_verifier: str = ""
    """A second verifier whose disagreements are logged and that never changes a reward. "": none."""

    answer_format: str = "auto"
    """Form of answer that the start-up self-test takes the prompts to ask for: auto reads it from them, answer_line ("Answer: ..."), boxed, or a
    template of your own with {answer}."""

    num_workers: PositiveInt = 1
    """Verifier processes. Raise it when the reward phase shows in the step time."""

    timeout_seconds: PositiveFloat = 10.0
    """Seconds one answer may take in a worker before that worker is killed and the outcome is "timeout"."""

    concurrency: PositiveInt = 64
    """Answers that each verifier process works on at a time where a user's function is an `async def`."""

    batch_size: PositiveInt = 16
    """Most responses of one call of a function of `samples`, and of the presets remote and reward_model."""

    token_ids: bool = False
    """Send reward functions the tokens of responses, as sample.token_ids, and the service of the preset remote."""

    memory_limit_mb: PositiveInt = 2048
    """Memory limit of one verifier process, in MiB."""

    file_limit_mb: PositiveInt = 256
    """Largest file that a verifier process may write, in MiB."""

    max_processes: PositiveInt = 64
    """Processes that a verifier process and everything it has started may be at a time. Beyond it all of them are killed and the
    outcome is "error"."""

    environment: tuple[str, ...] = ()
    """Names of environment variables that verifier processes get beside PATH, LD_LIBRARY_PATH and the language. A reward function
    that asks a service for its verdict may need its key here."""

    correct: float = 1.0
    """Reward of a correct answer."""

    incorrect: float = -1.0
    """Reward of any other answer."""

    overlong_punishment: OverlongPunishmentConfig = OverlongPunishmentConfig()
    """Soft punishment of long responses, added to the reward."""

    perplexity_penalty: PerplexityPenaltyConfig = PerplexityPenaltyConfig()
    """Soft penalty of improbable responses, added to the reward."""

    format: FormatRewardConfig = FormatRewardConfig()
    """Reward of the response's form, added to the reward, and the form that the preset format asks of responses."""

    code: CodeRewardConfig = CodeRewardConfig()
    """Tests and limits of the preset code."""

    judge: JudgeRewardConfig = JudgeRewardConfig()
    """Endpoint, template and scale of the preset judge."""

    remote: RemoteRewardConfig = RemoteRewardConfig()
    """Service of the preset remote."""

    reward_model: RewardModelConfig = RewardModelConfig()
    """Classifier of the preset reward_model."""

    overlong_filter: bool = False
    """Leave truncated responses out of the loss (their tokens leave the denominator, too). Not the same as the
    punishment."""

    allow_overlong_filter_and_punishment: bool = False
    """Allow overlong_filter together with overlong_punishment, knowing that truncated responses then never feel the
    punishment."""

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Verifiers that score training responses: one, or those of the mixture's components."""
        return tuple(one.verifier for one in self.mix) if self.verifier == "mix" else (self.verifier,)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the mixture's components in metrics and samples."""
        return tuple(one.name or one.verifier.rpartition(":")[2] for one in self.mix)

    @property
    def num_processes(self) -> int:
        """Verifier processes of all components, beside those of a shadow verifier."""
        return self.num_workers * len(self.verifiers)
