"""A stock SGLang server with and without drafts from earlier responses: what it samples, and how fast.

    python benchmarks/gpu/speculation.py --engine-python PATH [--json] [--save] [--attention triton] [--only distribution]

Servers of the quickstart's base model, which comes with the package, answer its prompts through this project's client and
engine. The second one has a corpus of what the first one said. Cases:

    distribution   1,024 responses to each of 4 prompts from either server: counts of tokens after each token by the
                   chi-square statistic under permutation of responses, lengths by Kolmogorov and Smirnov; `p_tokens` and
                   `p_lengths` are the least probability of a prompt, times their number. `p_other`: of the first server
                   against itself at temperature 0.9, which the test must tell apart (0.004 is the least)
    tail           16 responses at a time: tokens_per_second, with and without drafts, and accepted tokens a step
    batch          256 at a time
    unknown        a 1.5B model with random weights, 16 at a time: nothing that is drafted is accepted, `speedup` is the cost

On a CPU SGLang has no kernels for drafts: there `--tiny` compares greedy responses of two servers without them, which must be
`identical`, and its figures mean nothing. How it runs and what a result holds: `program.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import program
import step
from program import Benchmark, Missing, Row
from sync import MODELS

from megatron_dapo.engines.sglang.client import SglangClient
from megatron_dapo.engines.sglang.drafting import documents_of
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.engines.sglang.keys import create_key, read_key
from megatron_dapo.engines.sglang.server import EngineStartError, SglangServer
from megatron_dapo.engines.sglang.server_settings import ServerSettings
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams

PACKAGES = ("torch", "sglang")
QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
CASES = ("distribution", "tail", "batch", "unknown")
START_MARGIN_S = 60.0
PERMUTATIONS = 999
CORPUS_TOKENS = 1_000_000


@dataclass(frozen=True)
class Size:
    """Prompts, responses to each, and tokens of a response."""

    prompts: int
    group: int
    tokens: int


SIZES: Mapping[str, Size] = {
    "distribution": Size(4, 1024, 256),
    "tail": Size(2, 8, 256),
    "batch": Size(32, 8, 256),
    "unknown": Size(2, 8, 256),
}
TINY = Size(2, 2, 24)


@dataclass
class Side:
    """A server, with or without drafts."""

    client: SglangClient
    engine: SglangEngine
    numbers: Iterator[int]
    drafts: bool

    def learn(self, name: str, responses: Sequence[Completion]) -> None:
        """Draft from these responses, and from no others."""
        if self.drafts:
            self.client.replace_corpus(name, documents_of([one.token_ids for one in responses]))

    def sample(self, prompts: Sequence[tuple[int, ...]], size: Size, stops: tuple[int, ...], temperature: float = 1.0) -> list[Completion]:
        """Return `size.group` responses to each of the prompts, each of them drawn anew."""
        sampling = SamplingParams(max_new_tokens=size.tokens, temperature=temperature, stop_token_ids=stops)
        requests = [
            GenerationRequest(f"{number}", prompt, sampling, seed=number)
            for prompt in prompts[: size.prompts]
            for number in itertools.islice(self.numbers, size.group)
        ]
        self.engine.submit(requests)
        done: list[Completion] = []
        while self.engine.num_unfinished:
            done += self.engine.poll()
        return sorted(done, key=lambda one: int(one.request_id))


@contextmanager
def serving(directory: Path, arguments: argparse.Namespace, model: Path, drafts: bool, **fields: Any) -> Iterator[Side]:
    """Start a server of `model`."""
    on_gpu = program.HAS_GPU
    settings = ServerSettings(
        python=arguments.engine_python,
        model_path=model,
        key_file=create_key(directory),
        log_dir=directory,
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        attention_backend=arguments.attention,
        sampling_backend=arguments.sampling,
        prefill_cuda_graph=False,
        max_running_requests=8 if arguments.tiny else 256,
        memory_fraction=0.3 if on_gpu else None,
        draft_tokens=arguments.draft_tokens if drafts and on_gpu else 0,
        draft_corpus_tokens=CORPUS_TOKENS,
        random_seed=int(drafts),
        start_timeout_s=max(60.0, arguments.case_s - START_MARGIN_S),
        **fields,
    )
    with ExitStack() as stack:
        server = SglangServer.start(settings)
        stack.callback(server.stop)
        try:
            info = server.wait_until_healthy()
        except EngineStartError as error:
            raise Missing(f"the SGLang server did not start: {error}") from None
        client = SglangClient(server.url, read_key(server.key_file), api_version=info.api_version)
        client.update_weight_version(0)
        engine = SglangEngine([client], SglangEngineSettings(client.max_length(), info.vocab_size, 256))
        stack.callback(engine.close)
        engine.set_policy_version(0)
        yield Side(client, engine, itertools.count(), settings.draft_tokens > 0)


def accepted(side: Side, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what `work` returns, and the tokens that a step of it gave a response."""
    before = side.engine.prefix_reuse
    result = work()
    reuse = side.engine.prefix_reuse - before
    return result, reuse.num_verified / max(1, reuse.num_verifications)


# ---- tests of two samples


def p_of_tokens(ours: Sequence[Completion], theirs: Sequence[Completion]) -> float:
    """Return the probability of counts of tokens after each token as different as these, if both samples of a prompt have one
    distribution.

    Tokens of a response depend on each other, so the chi-square statistic is compared with what it is when responses change
    sides at random, which they may under one distribution. At least 1 / (PERMUTATIONS + 1).
    """
    whole = [*ours, *theirs]
    tokens = np.concatenate([one.token_ids for one in whole]).astype(np.int64)
    before = np.concatenate([np.append([-1], one.token_ids[:-1]) for one in whole])
    _, cells = np.unique((before + 1) * (int(tokens.max()) + 1) + tokens, return_inverse=True)
    rows = np.repeat(np.arange(len(whole)), [one.num_tokens for one in whole])
    totals, draw = np.bincount(cells), np.random.default_rng(0)
    share = len(ours) / len(whole)
    is_ours = np.arange(len(whole)) < len(ours)

    def statistic() -> float:
        counts = np.bincount(cells[is_ours[rows]], minlength=len(totals))
        return float(((counts - share * totals) ** 2 / totals).sum())

    observed, larger = statistic(), 0
    for _ in range(PERMUTATIONS):
        draw.shuffle(is_ours)
        larger += statistic() >= observed
    return (1 + larger) / (1 + PERMUTATIONS)


def p_of_lengths(ours: Sequence[Completion], theirs: Sequence[Completion]) -> float:
    return kolmogorov_p([one.num_tokens for one in ours], [one.num_tokens for one in theirs])


def kolmogorov_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the probability of distribution functions as far apart as these, by Kolmogorov's limit (too large for ties)."""
    mine, other = (np.sort(np.asarray(side, np.float64)) for side in (ours, theirs))
    values = np.concatenate((mine, other))
    shares = [np.searchsorted(side, values, side="right") / len(side) for side in (mine, other)]
    size = math.sqrt(len(mine) * len(other) / (len(mine) + len(other)))
    scaled = (size + 0.12 + 0.11 / size) * float(np.abs(shares[0] - shares[1]).max())
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)]
    return min(1.0, max(0.0, sum(terms))) if scaled > 0.2 else 1.0


def least_p(ours: Sequence[Completion], theirs: Sequence[Completion], size: Size, test: Callable[..., float]) -> float:
    """Return the least p of the prompts' tests, times their number."""
    groups = [slice(index * size.group, (index + 1) * size.group) for index in range(size.prompts)]
    return min(1.0, size.prompts * min(test(ours[group], theirs[group]) for group in groups))


# ---- cases


def distribution(plain: Side, drafting: Side, prompts: Sequence[tuple[int, ...]], size: Size, stops: tuple[int, ...], is_tiny: bool) -> Row:
    temperature = 0.0 if is_tiny else 1.0
    ours = plain.sample(prompts, size, stops, temperature)
    drafting.learn("said", ours)
    theirs, given = accepted(drafting, lambda: drafting.sample(prompts, size, stops, temperature))
    row: Row = {"accepted": given, "tokens": sum(one.num_tokens for one in (*ours, *theirs))}
    if is_tiny:
        return {**row, "identical": all((a.token_ids == b.token_ids).all() for a, b in zip(ours, theirs, strict=True))}
    colder = plain.sample(prompts, size, stops, 0.9)
    return {
        **row,
        "p_tokens": least_p(ours, theirs, size, p_of_tokens),
        "p_lengths": least_p(ours, theirs, size, p_of_lengths),
        "p_other": least_p(ours, colder, size, p_of_tokens),
    }


def speed(plain: Side, drafting: Side, prompts: Sequence[tuple[int, ...]], size: Size, stops: tuple[int, ...], rounds: int) -> Row:
    """Measure in turns, after one warm-up of each; the second server knows what the first one said in it."""
    said = plain.sample(prompts, size, stops)
    drafting.learn(f"said {size}", said)
    drafting.sample(prompts, size, stops)
    tokens, seconds, given = [0, 0], [0.0, 0.0], 0.0
    for _ in range(rounds):
        for index, side in enumerate((plain, drafting)):
            start = time.perf_counter()
            done, given = accepted(side, lambda side=side: side.sample(prompts, size, stops))  # type: ignore[misc]
            seconds[index] += time.perf_counter() - start
            tokens[index] += sum(one.num_tokens for one in done)
    without, with_drafts = (count / spent for count, spent in zip(tokens, seconds, strict=True))
    return {"tokens_per_second": with_drafts, "without": without, "speedup": with_drafts / without, "accepted": given}


@contextmanager
def measuring(arguments: argparse.Namespace) -> Iterator[Callable[[str], Row]]:
    if arguments.engine_python is None:
        raise Missing("--engine-python names no interpreter with SGLang")
    with tempfile.TemporaryDirectory(prefix="gpu-drafting-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        prompts, stops = quickstart_prompts(), stop_tokens()
        pair: list[Side] = []

        def sides(model: Path, **fields: Any) -> list[Side]:
            return [stack.enter_context(serving(directory, arguments, model, drafts, **fields)) for drafts in (False, True)]

        def measure_case(name: str) -> Row:
            size = TINY if arguments.tiny else SIZES[name]
            if name == "unknown":
                if arguments.tiny:
                    raise Missing("a model of this size is for GPUs")
                stack.close()  # one pair of servers at a time
                pair.clear()
                model = write_model(directory / "unknown")
                plain, drafting = sides(model, random_weights=True)
                return speed(plain, drafting, prompts, size, (), arguments.rounds)
            pair.extend(sides(QUICKSTART / "base_model") if not pair else [])
            plain, drafting = pair
            if name == "distribution":
                return distribution(plain, drafting, prompts, size, stops, arguments.tiny)
            return speed(plain, drafting, prompts, size, stops, 1 if arguments.tiny else arguments.rounds)

        yield measure_case


def write_model(directory: Path) -> Path:
    """Write the configuration of a model of 1.5B parameters."""
    directory.mkdir()
    config = {**step.QWEN, **MODELS["1.5b"], "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def quickstart_prompts() -> list[tuple[int, ...]]:
    """Return the prompts of the quickstart as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "base_model")
    rows = [json.loads(line) for line in (QUICKSTART / "train.jsonl").read_text(encoding="utf-8").splitlines()[:64]]
    texts = [row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}] for row in rows]
    return [tuple(tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)) for text in texts]


def stop_tokens() -> tuple[int, ...]:
    found = json.loads((QUICKSTART / "base_model" / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    return tuple(found) if isinstance(found, list) else (found,)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    parser.set_defaults(case_s=300.0)
    parser.add_argument("--engine-python", type=program.absolute, help="interpreter with SGLang")
    parser.add_argument("--attention", default="triton", help="the servers' attention_backend")
    parser.add_argument("--sampling", default="pytorch", help="the servers' sampling_backend")
    parser.add_argument("--draft-tokens", type=int, default=8, help="sglang.draft_tokens")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of every speed")
    return parser.parse_args(arguments)


SPECULATION = Benchmark("gpu_speculation", __file__, PACKAGES, lambda arguments: list(CASES), measuring)

if __name__ == "__main__":
    program.run(SPECULATION, parse())
