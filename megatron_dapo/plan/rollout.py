"""Estimates the seconds of generation from response lengths, the time of a decoding step, the queue and the longest
responses."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.device import REQUEST_SECONDS, SHARES, TICK_SECONDS, Gpu
from megatron_dapo.plan.memory import EngineMemory, num_parameters

NUM_QUANTILES = 256
SIGMA = 1.0  # standard deviation of log length: most responses are short and a few reach the limit
MEAN_SHARE = 0.25  # default mean of reasoning rollouts, as a share of the longest response
MEAN_PROMPT_SHARE = 0.125  # mean prompt, as a share of the longest prompt
READ_PROMPT_SHARE = 0.5  # mean prompt that only a teacher reads, as a share of the longest prompt, which it sets
KEPT_SHARE = 0.6  # share of groups that remain after all-right and all-wrong ones are dropped
REDUCTION_SECONDS = 30e-6  # small all-reduce between nodes by RDMA; an order of magnitude, not measured
MOST_SIMULATED = 4096  # most responses of an engine that are simulated one by one


@dataclass(frozen=True)
class Lengths:
    """Quantiles of the response lengths, and the mean prompt length."""

    responses: tuple[int, ...]
    prompt: float
    context: float = 0.0  # mean tokens of earlier windows, which a window is generated after

    @cached_property
    def mean(self) -> float:
        return sum(self.responses) / len(self.responses)

    @cached_property
    def mean_square(self) -> float:
        """Mean squared length of whole sequences."""
        return sum((self.prompt + length) ** 2 for length in self.responses) / len(self.responses)

    @cached_property
    def held(self) -> float:
        """Tokens in the cache per running response, averaged over its lifetime."""
        return self.prompt + sum(length * length for length in self.responses) / (2 * sum(self.responses))

    def in_windows(self, window: int) -> Lengths:
        """Return the lengths of the pieces that one step generates if responses are cut into windows."""
        pieces: list[int] = []
        context = 0
        for length in self.responses:
            pieces += [window] * (length // window) + ([length % window] if length % window else [])
            context += sum(range(0, length, window))
        return Lengths(tuple(pieces), self.prompt, context / len(pieces))


def lengths_of(config: Config, mean_response: float | None = None) -> Lengths:
    """Return lengths that are log-normal up to the longest response, with this mean (None: a quarter of the
    longest)."""
    longest = config.rollout.max_response_tokens
    mean = min(mean_response or MEAN_SHARE * longest, 0.9 * longest)
    return Lengths(_quantiles(longest, mean), MEAN_PROMPT_SHARE * config.data.max_prompt_tokens)


@lru_cache(maxsize=64)
def _quantiles(longest: int, mean: float) -> tuple[int, ...]:
    scores = [NormalDist().inv_cdf((index + 0.5) / NUM_QUANTILES) for index in range(NUM_QUANTILES)]

    def cut(median: float) -> list[int]:
        return [max(1, min(longest, round(median * math.exp(SIGMA * score)))) for score in scores]

    low, high = 1e-3, 100.0 * longest
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sum(cut(middle)) < mean * NUM_QUANTILES else (low, middle)
    return tuple(cut(high))


@dataclass(frozen=True)
class EngineRates:
    """Bytes that an engine reads and operations that it does in a decoding step."""

    weight_bytes: float  # a rank's
    bytes_per_token: float  # bytes in a rank's cache
    active_parameters: float  # the whole model's, per token
    ranks: int
    gpu: Gpu
    expert_share: float = 0.0  # share of the weights that belongs to experts
    chosen_share: float = 1.0  # share of the experts that a token chooses
    fp8: bool = False
    reductions: int = 0  # all-reduces of a step between nodes
    absorbed_width: int = 0  # elements of a cached token that latent attention multiplies, in all layers
    bytes_per_state: int = 0  # a response's in gated delta nets, on a rank
    local_bytes: float = 0.0  # part of `bytes_per_token` in layers that see only a window
    window: int = 0  # tokens

    def tick(self, running: float, context: float) -> tuple[float, float, float]:
        """Return the seconds of one decoding step for memory reads, for products and for overhead.

        `context`: tokens of all `running` responses together.
        """
        # Experts that no token chooses are not read.
        experts = 1 - (1 - self.chosen_share) ** running
        dense = self.weight_bytes * (1 - self.expert_share) + context * self.bytes_per_token
        dense -= max(0.0, context - running * self.window) * self.local_bytes
        dense += 2 * running * self.bytes_per_state  # read and written
        read = dense / SHARES.decode_memory + self.weight_bytes * self.expert_share * experts / SHARES.decode_experts
        read /= self.gpu.memory_bytes_s
        rate = self.ranks * self.gpu.flops * SHARES.decode_flops * (2 if self.fp8 else 1)
        products = 2 * (self.active_parameters * running + self.absorbed_width * context) / rate
        return read, products, TICK_SECONDS + REQUEST_SECONDS * running + REDUCTION_SECONDS * self.reductions

    def seconds(self, running: float, context: float) -> float:
        read, products, overhead = self.tick(running, context)
        return max(read, products) + overhead


def engine_rates(config: Config, architecture: ModelArchitecture, engine: EngineMemory, gpu: Gpu) -> EngineRates:
    """Return the rates of one SGLang server."""
    experts = expert_parameters(architecture)
    whole = num_parameters(architecture)
    active = active_parameters(architecture)
    is_fp8 = config.sglang.quantization == "fp8"
    kinds, local = architecture.kinds_of_layers.items(), architecture.local
    share = len(local.layers) / architecture.num_layers if local else 0.0
    return EngineRates(
        weight_bytes=engine.weights,
        bytes_per_token=engine.bytes_per_token,
        active_parameters=active,
        ranks=config.sglang.tp_size,
        gpu=gpu,
        expert_share=experts / whole,
        chosen_share=architecture.num_experts_per_token / architecture.num_experts if architecture.num_experts else 1.0,
        fp8=is_fp8,
        reductions=2 * architecture.num_layers if config.sglang.nodes_per_server > 1 else 0,
        absorbed_width=sum(len(layers) * part.absorbed_width for parts, layers in kinds for part in parts),
        bytes_per_state=engine.bytes_per_state,
        local_bytes=share * engine.bytes_per_token,
        window=local.window if local else 0,
    )


def expert_parameters(architecture: ModelArchitecture) -> int:
    """Return the elements of all experts."""
    per_layer = architecture.num_experts * 3 * architecture.hidden_size * architecture.moe_intermediate_size
    return (len(architecture.experts.layers) if architecture.experts else 0) * per_layer


def active_parameters(architecture: ModelArchitecture) -> float:
    """Return the elements that multiply one token: without the embedding, and with only the chosen experts."""
    embedding = 0 if architecture.tie_word_embeddings else architecture.vocab_size * architecture.hidden_size
    experts = expert_parameters(architecture)
    chosen = experts * architecture.num_experts_per_token / architecture.num_experts if experts else 0.0
    return num_parameters(architecture) - embedding - experts + chosen


@dataclass(frozen=True)
class Queue:
    """Responses of one engine in a step: how many run at once, and how many wait."""

    responses: int
    running: int  # most at once
    waiting: int  # initial number
    last_start: float  # seconds until the last response begins
    longest_seconds: float  # time of the longest response, at the engine's load during it
    seconds: float  # end of the last response
    idle_share: float  # share of the `running` slots that are idle, over the time
    read: float  # share of the seconds; so are the two below
    products: float
    overhead: float


def running_at_once(config: Config, engine: EngineMemory, lengths: Lengths) -> int:
    """Return how many responses a server decodes at a time: limited by its setting and by its cache."""
    return max(1, min(config.sglang.max_running_requests, engine.holds(lengths.held)))


def prefill_seconds(config: Config, rates: EngineRates, queue: Queue, lengths: Lengths) -> float:
    """Return the seconds of a server's prefill in a step.

    Each prompt is computed once for its group. Carried-over responses are computed again, because new weights
    invalidate the cache.
    """
    carried = queue.running * lengths.held if config.rollout.partial_rollout else 0.0
    tokens = carried + queue.responses * lengths.prompt / config.rollout.group_size
    rate = rates.ranks * rates.gpu.flops * SHARES.prefill * (2 if rates.fp8 else 1)
    return 2 * rates.active_parameters * tokens / rate


@lru_cache(maxsize=4096)
def simulate(rates: EngineRates, lengths: Lengths, responses: int, running: int, has_tail: bool) -> Queue:
    """Simulate decoding `responses` in one engine, `running` at a time; each finished one is replaced by the next in
    the queue.

    `has_tail`: the phase ends with the last response. Otherwise it ends once that many tokens are generated, and
    unfinished responses continue in the next step.
    """
    if not has_tail or responses > MOST_SIMULATED:
        return _steady(rates, lengths, responses, min(running, responses), has_tail)
    ordered = sorted(lengths.responses)
    drawn = [ordered[int((index + 0.5) * len(ordered) / responses)] for index in range(responses)]
    drawn[-1] = ordered[-1]  # one of them has the full length
    random.Random(0).shuffle(drawn)
    return _follow(rates, lengths, drawn, running)


def _follow(rates: EngineRates, lengths: Lengths, drawn: list[int], running: int) -> Queue:
    waiting, most = drawn[::-1], max(drawn)
    ends: list[tuple[int, int]] = []  # (decoding step in which a response ends, step in which it began)
    step, context, seconds, places = 0, 0.0, 0.0, 0.0
    last_start = began_longest = longest = 0.0
    parts = [0.0, 0.0, 0.0]
    while ends or waiting:
        while waiting and len(ends) < running:
            length = waiting.pop()
            heapq.heappush(ends, (step + length, step))
            context += lengths.prompt
            last_start = seconds
            if length == most:
                began_longest = seconds
        end, _ = ends[0]
        steps, count = end - step, len(ends)
        tick = rates.tick(count, context + count * steps / 2)
        lasts = (max(tick[0], tick[1]) + tick[2]) * steps
        parts[0 if tick[0] >= tick[1] else 1] += max(tick[0], tick[1]) * steps
        parts[2] += tick[2] * steps
        seconds, places, context, step = seconds + lasts, places + lasts * count, context + count * steps, end
        while ends and ends[0][0] == step:
            _, began = heapq.heappop(ends)
            context -= step - began + lengths.prompt
            if step - began == most:
                longest = seconds - began_longest
    used = min(running, len(drawn))
    return Queue(
        len(drawn),
        used,
        len(drawn) - used,
        last_start,
        longest,
        seconds,
        1 - places / (used * seconds),
        *(part / seconds for part in parts),
    )


def _steady(rates: EngineRates, lengths: Lengths, responses: int, running: int, has_tail: bool) -> Queue:
    """Assume a full engine throughout; the tail is one longest response that begins halfway through the last ones."""
    read, products, overhead = rates.tick(running, running * lengths.held)
    tick = max(read, products) + overhead
    full = responses * lengths.mean / running * tick
    longest = max(lengths.responses) * rates.seconds(max(1, running / 4), running / 4 * lengths.held)
    seconds = max(full, longest) + (longest / 2 if has_tail else 0.0)
    shares = [read / tick if read >= products else 0.0, products / tick if products > read else 0.0, overhead / tick]
    if not has_tail:
        seconds = full
    waits = max(0.0, full - lengths.mean * tick)
    return Queue(responses, running, responses - running, waits, longest, seconds, 1 - full / seconds, *shares)
