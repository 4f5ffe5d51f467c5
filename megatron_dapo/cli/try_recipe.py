"""`megatron-dapo try RECIPE`: responses of the untrained model with their rewards, and what a step would make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megatron_dapo.cli.options import RecipeArgument, SetOption, refuse
from megatron_dapo.cli.run import checked_config
from megatron_dapo.config import Config
from megatron_dapo.run.derive import for_sampling
from megatron_dapo.telemetry.terminal import status

if TYPE_CHECKING:
    from megatron_dapo.types import Group

_MANY_CUT = 0.2  # share of responses from which a longer limit is worth a line


def try_recipe(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    prompts: Annotated[int, typer.Option(min=1, help="training prompts, from all over the data")] = 4,
    responses: Annotated[int, typer.Option(min=1, help="responses to each")] = 4,
) -> None:
    """Sample a few responses of the untrained model and show their rewards, before anything is trained.

    Exit code: 0 done, 1 servers or every reward failed, 2 refused.
    """
    config = checked_config(recipe, overrides, for_sampling)
    from megatron_dapo.run.evaluate import try_prompts
    from megatron_dapo.telemetry.completions import completions_table, distinct_tasks, task_of
    from megatron_dapo.telemetry.samples import sample_record

    try:
        with status(f"loading {config.model.path.name}, then sampling {prompts * responses} responses"):
            groups = try_prompts(config, prompts, responses)
    except ValueError as error:
        refuse(error)
    except RuntimeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    console = Console()
    records = [[sample_record(0, group, index, None) for index in range(len(group.samples))] for group in groups]
    tasks = distinct_tasks([task_of(group[0]) for group in records])
    for number, (group, task) in enumerate(zip(records, tasks), start=1):
        console.print(completions_table(group, title=f"prompt {number}", task=task))
    _show_episode(console, config, groups)
    for line in findings(config, groups):
        typer.echo(line)
    if all(one.score.failure for group in groups for one in group.samples):
        raise typer.Exit(1)


def _show_episode(console: Console, config: Config, groups: Sequence[Group]) -> None:
    """Print the episode with the most turns; nothing if responses have one turn."""
    samples = [one for group in groups for one in group.samples if one.completion.episode is not None]
    if not samples:
        return
    from megatron_dapo.data.model_inputs import read_model_inputs
    from megatron_dapo.telemetry.completions import conversation_table

    inputs = read_model_inputs(config.model.path, config.model.trust_remote_code)
    shown = max(samples, key=lambda one: len(one.completion.runs))
    title = (
        f"episode {shown.sample_id}, reward {shown.reward:.2f}: what the policy sampled is trained, what it read is not"
    )
    console.print(conversation_table(shown.completion, inputs.decode, title))


def findings(config: Config, groups: Sequence[Group]) -> Iterator[str]:
    """Yield what a step would make of these groups: rewards, groups that are filtered, responses that are cut, failures."""
    from megatron_dapo.algorithms.dynamic_sampling import GroupFilter

    samples = [one for group in groups for one in group.samples]
    rewards = [one.reward for one in samples]
    spreads = [max(found) - min(found) for found in ([one.reward for one in group.samples] for group in groups)]
    yield (
        f"rewards: mean {sum(rewards) / len(rewards):.2f}, from {min(rewards):g} to {max(rewards):g}; spread within a group "
        f"{sum(spreads) / len(spreads):.2f} on average, 0 in {sum(not one for one in spreads)} of {len(groups)}"
    )
    rollout = config.rollout
    if rollout.filter_groups and not rollout.group_filter:
        rule = GroupFilter(rollout.accuracy_min, rollout.accuracy_max)
        decisions = [rule.decide([one.score.accuracy for one in group.samples]) for group in groups]
        if wrong_or_right := [one for one in decisions if one != "kept"]:
            wrong = wrong_or_right.count("all_wrong")
            yield (
                f"{len(wrong_or_right)} of {len(groups)} groups would be filtered: {wrong} all wrong, {len(wrong_or_right) - wrong} all "
                f"right{_hint(wrong, len(groups))}"
            )
    cut = sum(one.completion.finish_reason == "length" for one in samples)
    if cut and config.environment.is_on:
        ends = Counter(one.completion.episode.end for one in samples if one.completion.episode is not None)
        shown = ", ".join(f"{count} by {end}" for end, count in ends.most_common() if end != "done")
        yield f"{cut} of {len(samples)} episodes were cut: {shown}"
    elif cut:
        raised = (
            f": raise rollout.max_response_tokens ({rollout.max_response_tokens})"
            if cut >= _MANY_CUT * len(samples)
            else ""
        )
        yield f"{cut} of {len(samples)} responses were cut at {rollout.max_response_tokens} tokens{raised}"
    if failed := [one.score for one in samples if one.score.failure]:
        yield f"{len(failed)} of {len(samples)} rewards failed, the first with: {failed[0].failure}"


def _hint(wrong: int, total: int) -> str:
    if wrong == total:
        return "; nothing would be learned from them: give partial credit, an example in the prompt, easier rows or a better model"
    return ""
