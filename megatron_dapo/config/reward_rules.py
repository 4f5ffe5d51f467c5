"""Relations between the fields of [reward]: verifiers, mixtures, and what presets need."""

from __future__ import annotations

from megatron_dapo.config.rules import Rule

# The same as in rewards.verifiers.verifier, which this layer may not import.
VERIFIER_PRESETS = ("dapo", "lenient", "code", "judge", "remote", "reward_model", "format")
GOLD_PRESETS = ("dapo", "lenient")  # presets that compare an answer with a gold answer
BUILT_IN_PARTS = (
    "verifier",
    "overlong",
    "perplexity",
    "format",
)  # a reward's parts besides those of a mixture or a user's function
_SERVICES = ("judge", "remote", "reward_model")

REWARD_RULES = (
    Rule(
        'reward.verifier == "mix" or reward.verifier in verifier_presets or is_function_path(reward.verifier)',
        f'set reward.verifier = "{VERIFIER_PRESETS[0]}"',
        reason="a preset, mix, package.module:function, or path/to/file.py:function",
    ),
    Rule(
        "reward.shadow_verifier in verifier_presets or is_function_path(reward.shadow_verifier)",
        f'set reward.shadow_verifier = "{VERIFIER_PRESETS[0]}"',
        where='reward.shadow_verifier != ""',
        reason="a preset, package.module:function, or path/to/file.py:function",
    ),
    Rule("reward.shadow_verifier != reward.verifier", 'set reward.shadow_verifier = "" or another verifier'),
    Rule("reward.correct > reward.incorrect", "set reward.correct = 1.0 and reward.incorrect = -1.0"),
    Rule(
        '(reward.verifier == "mix") == (reward.mix != ())',
        'set reward.verifier = "mix" where there are tables [[reward.mix]], and only there',
        reason="the tables are the components of that verifier",
    ),
    Rule(
        "not [one.verifier for one in reward.mix if not (one.verifier in verifier_presets or is_function_path(one.verifier))]",
        "give every table of reward.mix a verifier: a preset, package.module:function, or path/to/file.py:function",
    ),
    Rule(
        "len(set(reward.part_names)) == len(reward.mix)",
        "give the tables of reward.mix different names: name = ...",
        reason="each is a part of the reward in the metrics",
    ),
    # The preset `format` is refused if the recipe also adds a format reward.
    Rule(
        'not [name for name in reward.part_names if name in built_in_parts and (name != "format" or "format" not in reward.verifiers)]',
        f"give the tables of reward.mix other names than {', '.join(BUILT_IN_PARTS)}: name = ...",
        reason="those are parts of every reward",
    ),
    Rule(
        "not [one for one in reward.mix if one.weight == 0]",
        "give every table of reward.mix a weight other than 0, or leave it out",
    ),
    Rule(
        "len([one for one in reward.mix if one.decides]) <= 1",
        "set decides = true in one table of reward.mix at most",
        reason="groups are filtered by one answer to whether a response is right",
    ),
    Rule(
        'data.columns.answer != "" or not [one for one in reward.verifiers if one in gold_presets]',
        "set data.columns.answer to the column of gold answers, or reward.verifier to one that needs none",
        reason="dapo and lenient compare with a gold answer",
    ),
    Rule(
        'data.columns.answer != "" or reward.code.tests != ""',
        "set reward.code.tests to the column of the tests, or data.columns.answer where gold answers hold them",
        where='"code" in reward.verifiers',
    ),
    Rule(
        "reward.timeout_seconds > 1 + reward.code.seconds_per_test",
        "set reward.timeout_seconds = {4 * reward.code.seconds_per_test + 1}",
        where='"code" in reward.verifiers',
        reason="all tests of a response together have one second less",
    ),
    Rule(
        "reward.code.memory_limit_mb <= reward.memory_limit_mb",
        "set reward.code.memory_limit_mb = {reward.memory_limit_mb}, or raise reward.memory_limit_mb",
        where='"code" in reward.verifiers',
        reason="a program is a child of a verifier process",
    ),
    Rule(
        "reward.code.max_processes + 4 <= reward.max_processes",
        "set reward.max_processes = {reward.code.max_processes + 4}",
        where='"code" in reward.verifiers',
        reason="a program is a child of a verifier process, and the sandbox has three of its own",
    ),
    Rule(
        'reward.judge.url.startswith("http")',
        'set reward.judge.url to an OpenAI-compatible endpoint, e.g. "http://127.0.0.1:8000/v1"',
        where='"judge" in reward.verifiers',
    ),
    Rule(
        'reward.remote.url.startswith("http")',
        'set reward.remote.url to the service that scores responses, e.g. "http://127.0.0.1:8000/score"',
        where='"remote" in reward.verifiers',
    ),
    *(
        Rule(
            f"reward.{name}.request_seconds <= reward.timeout_seconds",
            f"set reward.timeout_seconds = {{reward.{name}.request_seconds * (1 + reward.{name}.retries)}}",
            where=f'"{name}" in reward.verifiers and reward.{name}.url',
            reason="all attempts of a request together have that long",
        )
        for name in _SERVICES
    ),
    Rule(
        'reward.reward_model.url.startswith("http")',
        'set reward.reward_model.url to an SGLang server of the classifier, e.g. "http://127.0.0.1:30000", or to ""',
        where='"reward_model" in reward.verifiers and reward.reward_model.url',
    ),
    Rule(
        'reward.judge.score_key == "" or reward.judge.score_pattern == ""',
        "leave reward.judge.score_key or reward.judge.score_pattern out",
        reason="a score is read in one way",
    ),
    Rule(
        'reward.reward_model.path != ""',
        "set reward.reward_model.path to the directory of a sequence classifier",
        where='"reward_model" in reward.verifiers',
    ),
    Rule(
        'reward.format.markers != () or reward.format.pattern != ""',
        "set reward.format.markers or reward.format.pattern",
        where='"format" in reward.verifiers',
    ),
    Rule(
        'reward.format.reward == 0 or "format" not in reward.verifiers',
        "set reward.format.reward = 0.0, or leave the verifier format out",
        reason="the form would be rewarded twice",
    ),
)
