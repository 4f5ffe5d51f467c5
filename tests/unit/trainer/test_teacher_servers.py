"""Teachers that are servers: which sequences are asked about, what comes back, and what happens if a server fails."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dapo.config.distillation_schema import DistillationConfig
from megatron_dapo.data.teacher_prompts import TeacherPrompts
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.engines.sglang.client import EngineGone, EngineHttpError
from megatron_dapo.trainer import teacher_servers
from megatron_dapo.trainer.batch_header import header_of, samples_of, sequences_of, with_numbers
from megatron_dapo.trainer.teacher_servers import TeacherServers
from megatron_dapo.types import Completion, Group, Prompt, Score, ScoredSample, VersionRange

WORDS = [f"w{index}" for index in range(50)]
TOKENIZER = type("Tokenizer", (), {"__len__": lambda self: 50, "decode": lambda self, ids: WORDS[ids[0]]})()


class FakeClient:
    """log p of a token is -its id / 10."""

    def __init__(self, url: str, key: str | None, name: str) -> None:
        self.url, self.name, self.failures, self.asked = url, name, 0, 0
        self.words: Sequence[str] = WORDS

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        self.asked += 1
        if self.asked <= self.failures:
            raise EngineGone(self.name, "POST /generate", "gone")
        return [-token / 10 for token in tokens[1:]]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        if max(ids) >= len(self.words):
            raise EngineHttpError(self.name, "POST /generate", 400, "beyond the vocabulary")
        return [self.words[index if index + 1 < len(self.words) else 0] for index in ids]  # SGLang shows the highest as 0.


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> TeacherServers:
    monkeypatch.setattr(teacher_servers, "SglangClient", FakeClient)
    teachers = (
        {"name": "all", "url": "http://one:1", "weight": 2.0},
        {"name": "sums", "url": "http://two:2", "sources": ("sums",)},
    )
    section = DistillationConfig.model_validate({"teachers": teachers})
    return TeacherServers(section, TeacherPrompts(section, PromptTemplate(TOKENIZER, "plain")))


def group(number: int, source: str, tokens: tuple[int, ...]) -> Group:
    prompt = Prompt(str(number), (), (1, 2), "", source=source)
    completion = Completion("r", tokens, [-0.5] * len(tokens), "stop", (VersionRange(0, len(tokens), 0),))
    sample = ScoredSample(f"{number}/0", completion, "", Score(1.0, 1.0, "correct"), {"verifier": 1.0})
    return Group(str(number), prompt, (sample,), 0, 0)


def test_gains_are_weighted_sums_over_the_servers_of_a_source(servers: TeacherServers) -> None:
    groups = [group(0, "sums", (7, 9)), group(1, "words", (3,))]
    gains = servers.gains(sequences_of(groups))
    np.testing.assert_allclose(gains[0], 3 * np.array([-0.2, -0.4]), rtol=1e-6)
    np.testing.assert_allclose(gains[1], [2 * 0.2], rtol=1e-6)
    total, tokens = servers.taught["all"]
    assert tokens == 3 and total == pytest.approx(0.2 + 0.4 - 0.2, rel=1e-5)
    assert servers.taught["sums"][1] == 2
    fields = {index: {"teacher_gains": gain} for index, gain in gains.items()}
    samples = with_numbers(samples_of(header_of(groups, 0, of_teachers=fields)), groups, fields)
    assert [one.source for one in samples] == ["sums", "words"]
    np.testing.assert_array_equal(samples[0].teacher_gains, gains[0])


def test_only_sequences_of_a_server_have_gains(servers: TeacherServers) -> None:
    groups = [group(0, "sums", (7, 9)), group(1, "words", (3,))]
    plain, taught = samples_of(header_of(groups, 0, of_teachers={1: {"teacher_gains": np.zeros(1, np.float32)}}))
    assert plain.teacher_gains is None and taught.teacher_gains.shape == (1,) and taught.teacher_gains.is_meta


def test_a_lost_connection_is_tried_again_and_an_answer_is_final(servers: TeacherServers) -> None:
    client = servers._clients[0][1]
    client.failures = 3
    assert len(servers.gains(sequences_of([group(0, "words", (3,))]))) == 1
    client.failures, client.asked = 99, 0
    with pytest.raises(EngineGone):
        servers.gains(sequences_of([group(0, "words", (3,))]))


def test_a_group_is_asked_about_once_and_a_dropped_one_forgotten(servers: TeacherServers) -> None:
    kept, dropped, resumed = group(0, "sums", (7, 9)), group(1, "sums", (3,)), group(2, "words", (4,))
    servers.begin(kept)
    servers.begin(dropped)
    assert len(servers._begun) == 4
    del dropped
    deadline = time.monotonic() + 60.0
    while len(servers._begun) > 2 and time.monotonic() < deadline:  # A request holds its group until it ends.
        gc.collect()
        time.sleep(0.01)
    gains = servers.gains(sequences_of([kept, resumed]))
    np.testing.assert_allclose(gains[0], 3 * np.array([-0.2, -0.4]), rtol=1e-6)
    np.testing.assert_allclose(gains[1], [2 * 0.1], rtol=1e-6)
    assert not servers._begun and servers._clients[0][1].asked == 3 and servers._clients[1][1].asked == 2
    servers.close()


def test_another_tokenizer_is_refused_in_one_line(servers: TeacherServers) -> None:
    servers.check_tokens(TOKENIZER)
    servers._clients[1][1].words = [*WORDS[:10], *reversed(WORDS[10:])]
    with pytest.raises(ValueError, match="sums at http://two:2 has another tokenizer.*39 of 49 ids.*such as 10") as caught:
        servers.check_tokens(TOKENIZER)
    assert "\n" not in str(caught.value)
    servers._clients[1][1].words = WORDS[:30]
    with pytest.raises(ValueError, match="does not take the policy's token ids"):
        servers.check_tokens(TOKENIZER)


def test_tokens_of_an_environment_gain_nothing(servers: TeacherServers, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [SimpleNamespace(start=0, end=1, is_sampled=True), SimpleNamespace(start=1, end=2, is_sampled=False)]
    monkeypatch.setattr(Completion, "runs", property(lambda self: runs))
    assert servers.gains(sequences_of([group(0, "words", (3, 9))]))[0].tolist() == pytest.approx([0.4, 0.0])
