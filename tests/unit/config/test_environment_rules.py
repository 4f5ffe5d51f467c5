"""Relations of [environment] with other sections, each refused in one line with its fix."""

from __future__ import annotations

import pytest

from megatron_dapo.config.validator import validate
from tests.unit.config.small import make

ON = "environment.path=games.py:Game"
REWARDED = "reward.verifier=environment"


def messages(*overrides: str) -> list[str]:
    return [str(one) for one in validate(make(" ".join(overrides)))]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward.verifier=environment"], "reward.verifier = 'environment': there is no environment that could reward"),
        ([ON, "environment.function=games.py:play"], "an episode has one environment"),
        ([ON, "environment.command=['./game']"], "an episode has one environment"),
        ([ON, 'environment.agent=["python"]'], "an episode has one environment"),
        (["environment.path=games.py"], "environment.path = 'games.py': it does not name code"),
        (["algorithm.credit=turn"], "only an environment rewards turns"),
        ([ON, "algorithm.credit=anchor", "reward.verifier=dapo"], "only an environment rewards turns"),
        ([ON, REWARDED, "algorithm.credit=turn", "algorithm.name=vapo"], "a critic gives each token its credit"),
        ([ON, REWARDED, "algorithm.credit=turn", "algorithm.advantage=reinforce_pp"], "the other advantages compare whole batches"),
        ([ON, "algorithm.turn_discount=0.9"], "an episode has one reward"),
        ([ON, "environment.max_context_tokens=3"], "an episode begins with up to data.max_prompt_tokens"),
        ([ON, "environment.max_context_tokens=100000"], "a micro-batch holds the longest episode"),
        ([ON, "reward.verifier=environment", "reward.shadow_verifier=dapo"], "an environment's rewards are compared with no"),
    ],
)
def test_a_relation_that_does_not_hold(overrides, expected):
    found = [message for message in messages(*overrides) if expected in message]
    assert len(found) == 1 and "Fix: " in found[0] and "\n" not in found[0]


def test_an_environment_with_defaults_is_valid():
    before = messages()
    assert messages(ON, "reward.verifier=environment") == before == messages("environment.max_context_tokens=100000")


def test_the_longest_sequence_is_an_episode_s_if_that_is_longer():
    plain = make()
    longest = plain.longest_trained
    assert make(f"{ON} environment.max_context_tokens={longest + 9}").longest_sequence == longest + 9
    assert make(f"environment.max_context_tokens={longest + 9}").longest_sequence == plain.longest_sequence
