"""Consumers of a completion read the tokens that the policy sampled; an environment's tokens are read on purpose only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import megatron_dapo
from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rollout.open_group import OpenGroup, settled
from megatron_dapo.trainer.build_rollout import reward_addends
from megatron_dapo.types import (
    Completion,
    Episode,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    TokenRun,
    Turn,
    VersionRange,
    num_distinct,
    token_runs,
)

PACKAGE = Path(megatron_dapo.__file__).parent

# Expressions that are completions by the package's habit of names, and the attributes that have an environment's tokens.
COMPLETIONS = ("completion", "response", "held", "prefix", "rest", "done", "segment", "stream", "completions")
WHOLE = ("token_ids", "logprobs")
# Modules that read all tokens of a stream, each with its reason.
ALLOWED = {
    "engines/base.py": "an engine's prefix is the context, whoever wrote it",
    "engines/distributed_embedded.py": "numbers travel between ranks",
    "engines/sglang/engine.py": "an engine's own turns, which are sampled as a whole",
    "proof/gateway/run.py": "it compares whole streams with the conversations served",
    "rollout/episodes/engine.py": "an inner engine's turns, and a held stream that is compared",
    "rollout/episodes/stream.py": "it makes the streams",
    "rollout/open_group.py": "a continued stream begins with the tokens held",
    "rollout/scoring.py": "text for the verifier and for people",
    "selection/embed.py": "the model reads whole sequences",
    "telemetry/completions.py": "shown to people, run by run",
    "telemetry/samples.py": "shown to people, token by token",
    "trainer/batch_header.py": "the model reads whole sequences; its masks come from the runs",
}


def reads(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WHOLE:
            owner = node.value
            while isinstance(owner, ast.Subscript):
                owner = owner.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name in COMPLETIONS or name in annotated(tree):
                yield f"{node.lineno}: {ast.unparse(node)}"


def annotated(tree: ast.AST) -> set[str]:
    """Names of parameters and variables that are annotated as completions."""
    return _annotated(ast.unparse(tree))


@cache
def _annotated(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg) and _is_completion(node.annotation)}
    return arguments | {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_completion(node.annotation)
    }


def _is_completion(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").split(" | ")[0] == "Completion"


def test_no_other_module_reads_an_environment_s_tokens() -> None:
    found = {
        str(path.relative_to(PACKAGE)): places
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "types.py" and (places := list(reads(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert {name: places for name, places in found.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) == set(found), "a module without such a read needs no permission"


@pytest.mark.parametrize(
    "source",
    [
        "sum(completion.logprobs)",
        "len(sample.completion.token_ids)",
        "group.completions[3].token_ids",
        "def f(one: Completion): return one.logprobs",
    ],
)
def test_the_test_finds_a_read(source: str) -> None:
    assert list(reads(ast.parse(source)))
    assert not list(
        reads(ast.parse(source.replace(".logprobs", ".sampled.logprobs").replace(".token_ids", ".num_sampled")))
    )


def episode(finish_reason="stop", end="done") -> Completion:
    """Two turns of 3 and 2 tokens, each answered by 2, the first also after 1 token of the environment."""
    turns = (Turn(1, 4, 6), Turn(6, 8, 10))
    return Completion(
        "g/0",
        np.arange(10),
        -np.arange(10) / 10,
        finish_reason,
        (VersionRange(0, 6, 1), VersionRange(6, 10, 2)),
        episode=Episode(end, turns),
    )


def test_runs_cover_a_stream() -> None:
    one = episode()
    kinds = [(run.start, run.end, run.is_sampled) for run in one.runs]
    assert kinds == [(0, 1, False), (1, 4, True), (4, 6, False), (6, 8, True), (8, 10, False)]
    assert one.sampled.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert one.sampled.logprobs.tobytes() == np.concatenate([one.logprobs[1:4], one.logprobs[6:8]]).tobytes()
    assert (one.num_sampled, one.num_tokens) == (5, 10)
    single = Completion("g/0", (1, 2), (-1.0, -2.0), "stop", (VersionRange(0, 2, 0),))
    assert single.sampled.token_ids is single.token_ids and single.runs == [TokenRun(0, 2, True, True)]
    assert token_runs(0, None) == token_runs(0, ()) == []
    for turns in ([Turn(0, 3, 2)], [Turn(0, 2, 4), Turn(3, 4, 4)], [Turn(0, 11, 11)]):
        with pytest.raises(ValueError, match="of a stream of 10 tokens"):
            token_runs(10, turns)


def test_rewards_of_length_and_perplexity_are_of_sampled_tokens() -> None:
    config = RewardConfig(
        overlong_punishment={"enabled": True, "max_length": 6, "cache_length": 4},
        perplexity_penalty={"enabled": True, "start": 0.1, "end": 1.0},
    )
    one = episode()
    segment = Segment((9,), np.arange(3), -np.arange(3) / 7, (VersionRange(0, 3, 2),), (Turn(1, 2, 3),))
    of_two_streams = replace(one, episode=replace(one.episode, segments=(segment,)))
    score = Score(1.0, 1.0, "correct")
    for played in (one, of_two_streams):
        sampled = played.sampled
        assert played.num_sampled == len(sampled.token_ids) == 5 + played.num_segments
        alone = Completion("g/0", sampled.token_ids, sampled.logprobs, "stop", (VersionRange(0, played.num_sampled, 0),))
        for name, addend in reward_addends(config).items():
            assert addend(played, "", score) == addend(alone, "", score), name
        assert addend(alone, "", score) != 0, name


def test_only_sampled_tokens_tell_episodes_apart() -> None:
    one = episode()
    other = Completion(
        "g/1",
        np.where([run in (0, 4, 5, 8, 9) for run in range(10)], 99, one.token_ids),
        one.logprobs,
        "stop",
        one.versions,
        episode=one.episode,
    )
    assert num_distinct([one, other]) == 1


def test_a_stop_token_inside_an_episode_does_not_end_it() -> None:
    sampling = SamplingParams(stop_token_ids=(9,))
    assert settled(episode("abort", "abort"), sampling).finish_reason == "abort"
    single = Completion("g/0", (1, 9), (-1.0, -2.0), "abort", (VersionRange(0, 2, 0),))
    assert settled(single, sampling).finish_reason == "stop"
    group = OpenGroup("g", Prompt("p", (), (1,), "7"), 0, size=1)
    assert group.add(0, episode("abort", "abort")) == 5
