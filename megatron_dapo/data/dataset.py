"""Prompts of a run, read once: checked, de-duplicated, rendered to token ids.

The published training file repeats its 17k problems about a hundred times, and the AIME file its 30 problems 32 times.
Rows with the same prompt and answer are one problem, and the report says how many there were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_dapo.config.data_schema import DataConfig
from megatron_dapo.data.files import DAPO_FORMAT, Row, RowFormat, file_sha256, prompt_id_of, question_of
from megatron_dapo.data.prompt_stream import FreshIds, SourceShare
from megatron_dapo.data.sources import Source, train_sources
from megatron_dapo.data.template import Messages, PromptTemplate, Tokenizer
from megatron_dapo.types import Prompt

logger = logging.getLogger(__name__)

MAX_LISTED = 10  # problems spelled out in a message
ALL_TRAINED = (
    "all {} held-out problems of data.eval_paths are also trained on, so accuracy would measure memory; name other rows "
    "there, or leave it empty"
)


class HasMessages(Protocol):
    """A row or a prompt."""

    @property
    def messages(self) -> Messages: ...


Asked = TypeVar("Asked", bound=HasMessages)

# answers -> those that no response could match, each with the reason (VerifierPool.validate_answers)
ValidateAnswers = Callable[[Iterable[str]], Mapping[str, str]]


@dataclass(frozen=True)
class Conflict:
    """One prompt with several gold answers: at most one can be right."""

    prompt: str  # the last turn, shortened
    answers: tuple[str, ...]
    locations: tuple[str, ...]


@dataclass(frozen=True)
class LoadReport:
    """Counts of rows, problems and prompts of a load. JSON-serializable through `record`."""

    files: tuple[tuple[str, str], ...]  # (path, sha256)
    template: str
    template_hash: str
    num_rows: int
    num_unique: int  # different (prompt, answer)
    num_too_long: int
    num_prompts: int  # kept
    max_prompt_tokens: int
    longest_prompt_tokens: int  # maximum of all unique prompts
    multiplicity_min: int  # rows a kept prompt had
    multiplicity_max: int
    conflicts: tuple[Conflict, ...]

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        return (
            f"{self.num_rows:,} rows -> {self.num_unique:,} unique (prompt, answer) -> {self.num_prompts:,} prompts "
            f"of at most {self.max_prompt_tokens:,} tokens ({self.num_too_long:,} too long; the longest has "
            f"{self.longest_prompt_tokens:,}; {self._copies()} rows each)"
        )

    def _copies(self) -> str:
        low, high = self.multiplicity_min, self.multiplicity_max
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of a run, in file order, with unique ids (unless loaded with deduplicate=False)."""

    prompts: tuple[Prompt, ...]
    report: LoadReport
    multiplicity: Mapping[str, int]  # prompt_id -> rows

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def by_id(self) -> Mapping[str, Prompt]:
        return {prompt.prompt_id: prompt for prompt in self.prompts}

    @property
    def prompt_ids(self) -> tuple[str, ...]:
        """Ids in file order, for the prompt stream."""
        return tuple(prompt.prompt_id for prompt in self.prompts)


def load_prompts(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    template: str = "chat",
    deduplicate: bool = True,
    validate_answers: ValidateAnswers | None = None,
    row_format: RowFormat = DAPO_FORMAT,
) -> PromptDataset:
    """Load training prompts; those longer than `max_prompt_tokens` are left out and counted.

    Raises ValueError on a missing, empty, damaged or wrongly structured file, on gold answers the verifier cannot
    use, and when no prompt is short enough.
    """
    sources = [Source(tuple(map(Path, paths)), row_format)] if paths else []
    return load_sources(sources, PromptTemplate(tokenizer, template), max_prompt_tokens, deduplicate, validate_answers)


def load_sources(
    sources: Sequence[Source],
    prompt_template: PromptTemplate,
    max_prompt_tokens: int,
    deduplicate: bool = True,
    validate_answers: ValidateAnswers | None = None,
    begin_episodes: bool = False,
) -> PromptDataset:
    """Load the prompts of several sources; a problem in two of them goes to the first. Errors: see `load_prompts`.

    Prompts that begin episodes are different problems if any of their columns is.
    """
    collected = _collect_sources(sources, deduplicate, begin_episodes)
    if not collected.rows:
        raise ValueError(
            "data.train_paths and data.sources have too few prompts to hold some out: set data.held_out_share = 0 or data.eval_paths"
        )
    _check_answers(collected.rows, validate_answers)
    prompts = [
        Prompt(
            *(prompt_id, row.messages, _rendered(row, prompt_template), row.answer),
            *(row.data_source or row.source, row.extra, row.source or row.data_source, begin_episodes),
        )
        for prompt_id, row in collected.rows
    ]
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ValueError(
            f"all {len(prompts)} prompts are longer than max_prompt_tokens = {max_prompt_tokens}: the shortest has "
            f"{shortest} tokens"
        )
    dataset = _dataset(collected, prompts, kept, max_prompt_tokens, prompt_template)
    _log(dataset)
    return dataset


def load_eval_sources(
    sources: Sequence[Source],
    prompt_template: PromptTemplate,
    max_prompt_tokens: int,
    validate_answers: ValidateAnswers | None = None,
    begin_episodes: bool = False,
) -> PromptDataset:
    """Load evaluation problems, each under its source's name: rows are grouped by problem, and none is left out.

    avg@k, pass@k and maj@k are then statistics over samples of one problem; `multiplicity` counts its rows in the files.
    ValueError for a prompt that is too long.
    """
    # A benchmark that lacks some of its problems is a different benchmark.
    dataset = load_sources(sources, prompt_template, max_prompt_tokens, True, validate_answers, begin_episodes)
    if dataset.report.num_too_long:
        raise ValueError(
            f"{dataset.report.num_too_long} of {dataset.report.num_unique} evaluation prompts are longer than "
            f"max_prompt_tokens = {max_prompt_tokens}: raise it to at least {dataset.report.longest_prompt_tokens}"
        )
    return dataset


# ---- training data against held-out data


def also_trained(held_out: Sequence[Asked], trained: Iterable[HasMessages]) -> list[Asked]:
    """Return the held-out prompts or rows whose question is also one of `trained`, whatever the answers are."""
    questions = {question_of(one.messages) for one in trained}
    return [one for one in held_out if question_of(one.messages) in questions]


def count_trained(held_out: Sequence[Prompt], trained: Iterable[Prompt]) -> int:
    """Return how many held-out problems are also trained on, and warn with their ids. ValueError if all of them are."""
    shared = also_trained(held_out, trained)
    if shared and len(shared) == len(held_out):
        raise ValueError(ALL_TRAINED.format(len(shared)))
    if shared:
        ids = ", ".join(prompt.prompt_id for prompt in shared[:MAX_LISTED])
        more = f" and {len(shared) - MAX_LISTED} more" if len(shared) > MAX_LISTED else ""
        logger.warning(
            "%d of %d held-out problems are also trained on, which makes accuracy look better: %s%s",
            *(len(shared), len(held_out), ids, more),
        )
    return len(shared)


# ---- from a recipe


def prompt_template(data: DataConfig, tokenizer: Tokenizer, vocab_size: int | None = None) -> PromptTemplate:
    """Return the template that renders a run's prompts. ValueError if the tokenizer has none."""
    return PromptTemplate(tokenizer, data.template, data.chat_template_options, vocab_size)


def shares_of(
    data: DataConfig, prompts: Sequence[Prompt], fresh: Mapping[str, FreshIds] | None = None
) -> list[SourceShare] | None:
    """Return each source's prompts and weight; None without data.sources. ValueError if a source has no prompt left.

    `fresh`: prompts of later epochs by the source's name.
    """
    if not data.sources:
        return None
    shares = []
    for source in train_sources(data):
        ids = tuple(prompt.prompt_id for prompt in prompts if prompt.source == source.name)
        if not ids:
            raise ValueError(
                f"data.sources: no prompt of {source.name!r} is left: all are longer than data.max_prompt_tokens = "
                f"{data.max_prompt_tokens}, or an earlier source has them; remove it"
            )
        shares.append(SourceShare(source.name, source.weight, ids, (fresh or {}).get(source.name)))
    return shares


# ---- stages


def _rendered(row: Row, template: PromptTemplate) -> tuple[int, ...]:
    try:
        return template.render(row.messages)
    except ValueError as error:
        raise ValueError(f"{row.location}: {error}") from error


@dataclass(frozen=True)
class CollectedRows:
    """Rows of one or several files, without duplicates."""

    num_rows: int
    rows: tuple[tuple[str, Row], ...]  # (prompt_id, first row with it), or every row
    multiplicity: Mapping[str, int]  # prompt_id -> rows
    files: tuple[tuple[str, str], ...] = ()  # (path, sha256)


def collect_rows(rows: Iterable[Row], deduplicate: bool = True, by_all_columns: bool = False) -> CollectedRows:
    """Keep one of several rows with the same prompt and answer (all if `deduplicate` is off), and count them.

    With `by_all_columns`, their other columns are the same, too.
    """
    kept: list[tuple[str, Row]] = []
    multiplicity: dict[str, int] = {}
    for row in rows:
        prompt_id = prompt_id_of(row.messages, row.answer, row.extra if by_all_columns else {})
        if not deduplicate or prompt_id not in multiplicity:
            kept.append((prompt_id, row))
        multiplicity[prompt_id] = multiplicity.get(prompt_id, 0) + 1
    return CollectedRows(sum(multiplicity.values()), tuple(kept), multiplicity)


def _collect_sources(sources: Sequence[Source], deduplicate: bool, by_all_columns: bool) -> CollectedRows:
    files = [path for source in sources for path in source.paths]
    if not files and not any(source.made for source in sources):
        raise ValueError("no data files given")
    collected = collect_rows((row for source in sources for row in source.rows()), deduplicate, by_all_columns)
    return replace(collected, files=tuple((str(file), file_sha256(file)) for file in files))


def _check_answers(rows: Sequence[tuple[str, Row]], validate_answers: ValidateAnswers | None) -> None:
    if validate_answers is None:
        return
    problems = validate_answers(row.answer for _, row in rows)
    bad = [row for _, row in rows if row.answer in problems]
    if bad:
        listed = "\n  ".join(f"{row.location}: {row.answer!r}: {problems[row.answer]}" for row in bad[:MAX_LISTED])
        raise ValueError(f"{len(bad)} gold answers cannot be used by the verifier, the first of them:\n  {listed}")


def _dataset(
    collected: CollectedRows,
    prompts: Sequence[Prompt],
    kept: Sequence[Prompt],
    max_prompt_tokens: int,
    template: PromptTemplate,
) -> PromptDataset:
    multiplicity = {prompt.prompt_id: collected.multiplicity[prompt.prompt_id] for prompt in kept}
    report = LoadReport(
        files=collected.files,
        template=template.name,
        template_hash=template.hash,
        num_rows=collected.num_rows,
        num_unique=len(collected.multiplicity),
        num_too_long=len(prompts) - len(kept),
        num_prompts=len(kept),
        max_prompt_tokens=max_prompt_tokens,
        longest_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts),
        multiplicity_min=min(multiplicity.values()),
        multiplicity_max=max(multiplicity.values()),
        conflicts=find_conflicts(collected.rows),
    )
    return PromptDataset(tuple(kept), report, multiplicity)


def find_conflicts(rows: Sequence[tuple[str, Row]]) -> tuple[Conflict, ...]:
    """Return the prompts that have several gold answers among (prompt_id, row)."""
    by_prompt: dict[str, dict[str, str]] = {}  # prompt -> answer -> location
    for _, row in rows:
        by_prompt.setdefault(prompt_id_of(row.messages, ""), {}).setdefault(row.answer, row.location)
    texts = {prompt_id_of(row.messages, ""): row.messages[-1]["content"] for _, row in rows}
    return tuple(
        Conflict(texts[key][:200], tuple(locations), tuple(locations.values()))
        for key, locations in by_prompt.items()
        if len(locations) > 1
    )


def _log(dataset: PromptDataset) -> None:
    report = dataset.report
    # If every row is a prompt, the first lines of a run have said it.
    logger.log(logging.DEBUG if report.num_prompts == report.num_rows else logging.INFO, "%s", report.summary())
    if report.conflicts:
        listed = "; ".join(
            f"{conflict.prompt[:80]!r}: {list(conflict.answers)} at {list(conflict.locations)}"
            for conflict in report.conflicts[:MAX_LISTED]
        )
        logger.warning("%d prompts have several different gold answers: %s", len(report.conflicts), listed)
