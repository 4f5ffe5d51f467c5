"""Sources of prompts of a recipe: files with their formats and weights, under the names that metrics use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dapo.config.rollout_schema import TASK_PREFIX, DataConfig, SourceConfig
from megatron_dapo.data.files import Row, RowFormat, made_rows, read_rows, sampled_rows
from megatron_dapo.data.made_problems import MadeProblems

# Variants of one recipe may have files of one name in several directories.
_SEPARATOR = "_"
_NUM_TRIED = 32  # made problems that a check looks at


@dataclass(frozen=True)
class Source:
    """Files that are read in one format and drawn from together, or problems that are made."""

    paths: tuple[Path, ...]
    row_format: RowFormat
    name: str = ""  # "": the rows' own data_source
    weight: float = 1.0
    made: MadeProblems | None = None  # in place of files
    is_fresh: bool = False  # other problems are made for each epoch

    def rows(self) -> Iterator[Row]:
        """Yield every row, in order. ValueError with the place and what was expected."""
        if self.made:
            yield from (replace(row, source=self.name) for row in made_rows(self.made, self.row_format))
        for path in self.paths:
            yield from (replace(row, source=self.name) for row in read_rows(path, self.row_format))

    def sample(self) -> Iterator[Iterator[Row]]:
        """Yield rows from places all over each file, or the first problems, a file at a time."""
        if self.made:
            yield made_rows(self.made, self.row_format, _NUM_TRIED)
        yield from (sampled_rows(path, self.row_format) for path in self.paths if path.exists())


def row_format(data: DataConfig) -> RowFormat:
    """Return the format in which data files are read unless a source sets another."""
    return RowFormat(data.columns.prompt, data.columns.answer, data.system_prompt, data.prompt_template)


def train_sources(data: DataConfig) -> tuple[Source, ...]:
    """Return the tables of data.sources, or data.train_paths as one source."""
    if not data.sources:
        return (Source(data.train_paths, row_format(data)),)
    names = _unique_names(
        [source.name or Path(source.path.removeprefix(TASK_PREFIX)).stem for source in data.sources], data.sources
    )
    return tuple(_source(source, name, data) for source, name in zip(data.sources, names))


def train_files(data: DataConfig) -> tuple[Path, ...]:
    """Return the files and directories that training prompts are read from."""
    return tuple(path for source in train_sources(data) for path in source.paths)


def eval_sources(data: DataConfig) -> tuple[Source, ...]:
    """Return a source for each of data.eval_paths; a single source has no name."""
    paths = data.eval_paths
    if len(paths) < 2:
        return tuple(Source((path,), row_format(data)) for path in paths)
    stems = [path.stem for path in paths]
    count = Counter(stems)
    names = [stem if count[stem] == 1 else f"{path.parent.name}{_SEPARATOR}{stem}" for path, stem in zip(paths, stems)]
    return tuple(Source((path,), row_format(data), name) for path, name in zip(paths, names))


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
        raise ValueError(f"data.sources: {paths} are all called {repeated[0]!r}; give each a name of its own")
    return list(names)
