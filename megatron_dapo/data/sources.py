"""Sources of prompts of a recipe: files with their formats and weights, under the names that metrics use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_dapo.config.data_schema import TASK_PREFIX, DataConfig, SourceConfig
from megatron_dapo.data.files import Row, RowFormat, count_rows, made_rows, prompt_id_of, question_of, read_rows, sampled_rows
from megatron_dapo.data.made_problems import MadeProblems

# Variants of one recipe may have files of one name in several directories.
_SEPARATOR = "_"
MIN_PROMPTS = 20  # a source with fewer holds none out
MIN_HELD_OUT, MAX_HELD_OUT = 4, 64
Part = Literal["all", "train", "held_out"]
_MOST_COUNTED = 50_000  # rows that are read within a second before a run starts
_NUM_TRIED = 32  # made problems that a check looks at


@dataclass(frozen=True)
class Source:
    """Files that are read in one format and drawn from together, or problems that are made."""

    paths: tuple[Path, ...]
    row_format: RowFormat
    name: str = ""  # "": the rows' own data_source
    weight: float = 1.0
    made: MadeProblems | None = None  # replaces files
    is_fresh: bool = False  # other problems are made for each epoch
    part: Part = "all"
    held_out_share: float = 0.0  # share of the prompts of its files, for the two parts
    others: tuple[Source, ...] = ()  # their held-out prompts are held out of this one, too

    def rows(self) -> Iterator[Row]:
        """Yield every row of its part, in order. ValueError with the place and what was expected."""
        divided = () if self.part == "all" else (self, *self.others)
        held_out = frozenset[str]().union(*(held_out_prompts(source)[0] for source in divided))
        for row in self._all_rows():
            if self.part == "all" or (question_id(row) in held_out) == (self.part == "held_out"):
                yield row

    def _all_rows(self) -> Iterator[Row]:
        if self.made:
            yield from (replace(row, source=self.name) for row in made_rows(self.made, self.row_format))
        for path in self.paths:
            yield from (replace(row, source=self.name) for row in read_rows(path, self.row_format))

    def sample(self) -> Iterator[Iterator[Row]]:
        """Yield rows from places all over each file, or the first problems, a file at a time; nothing of the files of a held-out
        part, which are training files."""
        if self.part == "held_out":
            return
        if self.made:
            yield made_rows(self.made, self.row_format, _NUM_TRIED)
        yield from (sampled_rows(path, self.row_format) for path in self.paths if path.exists())


def question_id(row: Row) -> str:
    """Return a hash of what a row asks, without system prompt, template and white space."""
    return prompt_id_of(({"role": "user", "content": question_of(row.turns)},), "")


def held_out_prompts(source: Source) -> tuple[frozenset[str], int]:
    """Return ids of the prompts of `source` that are held out, and the number of its prompts.

    Those with the smallest hashes, so the order of rows, a system prompt or a template change nothing, and all rows of a
    prompt are in one part.
    """
    prompts = {question_id(row) for row in replace(source, part="all").rows()}
    if len(prompts) < MIN_PROMPTS:
        return frozenset(), len(prompts)
    count = min(MAX_HELD_OUT, max(MIN_HELD_OUT, round(source.held_out_share * len(prompts))), len(prompts) - 1)
    return frozenset(sorted(prompts)[:count]), len(prompts)


@dataclass(frozen=True)
class PromptCounts:
    """Different prompts of a run; 0: not counted, as of made problems or of large files."""

    train: int
    held_out: int


def count_prompts(data: DataConfig) -> PromptCounts:
    """Return the prompts that a run trains and evaluates. ValueError for a file that cannot be read."""
    if data.holds_out and not data.sources and _is_countable(_of_train_paths(data, "all")):
        held_out, total = held_out_prompts(_of_train_paths(data, "all"))
        return PromptCounts(total - len(held_out), len(held_out))
    evaluated = eval_sources(data)
    are_many = data.holds_out and not all(map(_is_countable, evaluated))
    return PromptCounts(_count(train_sources(data)), MAX_HELD_OUT if are_many else _count(evaluated))


def _count(sources: Sequence[Source]) -> int:
    if not all(map(_is_countable, sources)):
        return 0
    return len({question_id(row) for source in sources for row in source.rows()})


def _is_countable(source: Source) -> bool:
    return source.made is None and sum(map(count_rows, source.paths)) <= _MOST_COUNTED


def row_format(data: DataConfig) -> RowFormat:
    """Return the format in which data files are read unless a source sets another."""
    return RowFormat(data.columns.prompt, data.columns.answer, data.system_prompt, data.prompt_template)


def train_sources(data: DataConfig) -> tuple[Source, ...]:
    """Return the tables of data.sources, or data.train_paths as one source."""
    return _of_tables(data, "train") if data.sources else (_of_train_paths(data, "train"),)


def _of_tables(data: DataConfig, part: Part) -> tuple[Source, ...]:
    """Return a part of the tables of data.sources that have files; a prompt of several is in the same part of all of them.
    Problems that are made are only trained."""
    names = _unique_names([source.label for source in data.sources], data.sources)
    sources = [_source(source, name, data) for source, name in zip(data.sources, names)]
    if not data.holds_out:
        return tuple(sources)
    files = [replace(one, part=part, held_out_share=data.held_out_share) for one in sources if one.made is None]
    divided = {one.name: replace(one, others=tuple(other for other in files if other is not one)) for one in files}
    return tuple(divided.get(one.name, one) for one in sources if one.name in divided or part == "train")


def train_files(data: DataConfig) -> tuple[Path, ...]:
    """Return the files and directories that training prompts are read from."""
    return tuple(path for source in train_sources(data) for path in source.paths)


def eval_sources(data: DataConfig) -> tuple[Source, ...]:
    """Return a source for each of data.eval_paths, or what is held out of the training files; a single source has no name."""
    paths = data.eval_paths
    if data.holds_out and not data.sources:
        return (_of_train_paths(data, "held_out"),)
    if data.holds_out:
        divided = _of_tables(data, "held_out")
        return divided if len(divided) > 1 else (replace(divided[0], name=""),)
    if len(paths) < 2:
        return tuple(Source((path,), row_format(data)) for path in paths)
    stems = [path.stem for path in paths]
    count = Counter(stems)
    names = [stem if count[stem] == 1 else f"{path.parent.name}{_SEPARATOR}{stem}" for path, stem in zip(paths, stems)]
    return tuple(Source((path,), row_format(data), name) for path, name in zip(paths, names))


def _of_train_paths(data: DataConfig, part: Part) -> Source:
    if not data.holds_out:
        return Source(data.train_paths, row_format(data))
    return Source(data.train_paths, row_format(data), part=part, held_out_share=data.held_out_share)


def _source(source: SourceConfig, name: str, data: DataConfig) -> Source:
    if not source.path.startswith(TASK_PREFIX):
        return Source((Path(source.path),), _format_of(source, data), name, source.weight)
    made = MadeProblems(source.path.removeprefix(TASK_PREFIX), source.size, source.seed, source.settings)
    return Source((), _format_of(source, data), name, source.weight, made, source.fresh)


def _format_of(source: SourceConfig, data: DataConfig) -> RowFormat:
    columns = source.columns or data.columns
    system = data.system_prompt if source.system_prompt is None else source.system_prompt
    template = data.prompt_template if source.prompt_template is None else source.prompt_template
    return RowFormat(columns.prompt, columns.answer, system, template)


def _unique_names(names: Sequence[str], sources: Sequence[SourceConfig]) -> list[str]:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        paths = ", ".join(source.path for source, name in zip(sources, names) if name == repeated[0])
        raise ValueError(f"data.sources: {paths} are all called {repeated[0]!r}; give each a unique name")
    return list(names)
