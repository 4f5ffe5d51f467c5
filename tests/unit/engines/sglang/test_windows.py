"""Successive batching over servers: windows continue after their prefix, also when a server dies in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from fake_server import FakeServer

from megatron_dapo.config.algorithm_schema import WindowConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.engines.sglang.client import SglangClient, Timeouts
from megatron_dapo.engines.sglang.engine import SglangEngine, SglangEngineSettings
from megatron_dapo.rollout.collector import CollectorInputs, sample_seed
from megatron_dapo.rollout.scoring import SampleScorer
from megatron_dapo.rollout.window_collector import WindowCollector
from megatron_dapo.types import Prompt, SamplingParams, Score

SAMPLING = SamplingParams(max_new_tokens=30, stop_token_ids=(2, 5, 7, 11))
PROMPTS = {f"p{i}": Prompt(f"p{i}", (), tuple(range(3, 5 + i)), "1") for i in range(9)}
SEED, GROUP_SIZE, WINDOW = 3, 4, 7


class Verifier:
    def score_many(self, items: Iterable[tuple[str, str, str, bool]]) -> dict[str, Score]:
        return {key: Score(0.0, -1.0, "truncated" if cut else "wrong") for key, _, _, cut, _ in items}


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


@pytest.mark.parametrize("dies", [False, True])
def test_windows_over_servers_are_the_unsplit_responses(make_server: Callable[..., FakeServer], dies: bool) -> None:
    servers = [make_server(weight_version="0", token_s=0.002), make_server(weight_version="0", token_s=0.002)]
    timeouts = Timeouts(connect_s=5, generate_s=30, control_s=5, health_s=1)
    clients = [SglangClient(server.url, server.key, timeouts) for server in servers]
    engine = SglangEngine(clients, SglangEngineSettings(max_length=128, vocab_size=100, poll_wait_s=0.02, abort_s=5.0))
    engine.set_policy_version(0)
    inputs = CollectorInputs(
        PromptStream(list(PROMPTS), seed=0, max_epochs=1),
        PROMPTS,
        engine,
        SampleScorer(Verifier(), decode),
    )
    config, window = RolloutConfig(group_size=GROUP_SIZE), WindowConfig(tokens=WINDOW)
    collector = WindowCollector(inputs, config, window, SAMPLING, SEED)
    num_polls = num_finished = num_steps = 0

    def disturb() -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls % 5 == 2:
            collector.hold()
        if dies and num_polls == 4:
            servers[1].kill()

    try:
        while not (batch := collector.collect(3, between_polls=disturb)).should_stop:
            for group in batch.groups:
                for sample in group.samples:
                    index = int(sample.sample_id.split("/")[1])
                    seed = sample_seed(SEED, group.group_id, index)
                    limit = min(sample.window.start + WINDOW, SAMPLING.max_new_tokens)
                    tokens, logprobs = servers[0].expected(
                        len(group.prompt.token_ids), seed, limit, SAMPLING.stop_token_ids
                    )
                    assert sample.completion.token_ids.tolist() == tokens
                    assert sample.completion.logprobs.tolist() == logprobs
                    ended = tokens[-1] in SAMPLING.stop_token_ids or len(tokens) == SAMPLING.max_new_tokens
                    assert sample.window.is_finished == ended
                    runs = sample.completion.versions
                    assert (runs[-1].start, runs[-1].version) == (sample.window.start, engine.policy_version)
                    num_finished += ended
            num_steps += 1
            engine.set_policy_version(num_steps)
            for server in servers:
                server.weight_version = str(num_steps)
    finally:
        engine.close()
    assert num_finished == GROUP_SIZE * len(PROMPTS) == collector.accounting().trained
    assert (engine.statistics.num_deaths > 0) == dies and num_steps > 5
