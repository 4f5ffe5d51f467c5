"""Sections of the data: prompts, their sources and columns, rewrites."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megatron_dapo.config.section import (
    Fraction,
    FunctionPath,
    InputPath,
    NonNegativeInt,
    PositiveInt,
    Rule,
    Section,
    Seed,
)

TASK_PREFIX = "reasoning_gym:"  # marks a source whose problems are generated, not read
Template = Literal["chat", "plain"]
InjectionTemplate = Literal["distractor", "wrong_hint", "noise", "answer_range"]  # keys of data.injection.TEMPLATES


class InjectionConfig(Section):
    """Adversarial prompt injection: rewrites of training prompts with the same answer; see
    `megatron_dapo/data/injection.py`. It changes the training distribution: watch held-out accuracy and, with
    wrong_hint, whether the policy still uses correct hints."""

    templates: tuple[InjectionTemplate, ...] = ()
    """Harder: distractor (an irrelevant statement), wrong_hint (a confident wrong answer; only if the answer is a whole
    number), noise (capitals and spaces). Easier: answer_range (ten numbers that include the answer, a whole number).
    Empty: off."""

    when: Literal["filtered", "visit"] = "filtered"
    """filtered: after dynamic sampling has dropped a group, the next step samples a harder rewrite of its prompt if all
    responses were right, an easier one if all were wrong; templates whose groups are kept are chosen more often. visit:
    a rewrite replaces the prompt itself, whatever its pass rate."""

    rate: Fraction = 0.25
    """filtered: largest share of rewrites among a batch's groups. visit: share of visits that get a rewrite."""

    ramp_prompts: NonNegativeInt = 0
    """Visits over which rate is reached linearly from 0. 0: the full rate from the beginning."""


class ColumnsConfig(Section):
    """Names of the data files' columns; dots lead into nested fields."""

    prompt: str = "prompt"
    """Chat messages, chat messages as JSON text, or plain text."""

    answer: str = "reward_model.ground_truth"
    """Gold answer. "": none, for a reward function that needs none."""


class SourceConfig(Section):
    """One source of training prompts, a table [[data.sources]]. Keys that it leaves out are as in [data]."""

    path: str
    """A file or saved directory as in data.train_paths, or reasoning_gym:TASK for generated problems that bring their
    verifier."""

    name: str = ""
    """Label in metrics, and the data_source of rows that have none. "": the name of the file or task."""

    weight: float = 1.0
    """Relative share of the prompts that come from this source; above 0."""

    columns: ColumnsConfig | None = None
    """Names of its columns."""

    system_prompt: str | None = None
    """System message for its prompts that have none."""

    prompt_template: str | None = None
    """Text of a prompt's last turn."""

    size: int = 10_000
    """Problems generated per epoch, for a reasoning_gym task; above 0."""

    fresh: bool = True
    """Generate new problems for each epoch, for a reasoning_gym task. Off: every epoch repeats those of the first."""

    seed: int = 0
    """Seed of the generated problems."""

    settings: dict[str, Any] = {}
    """Settings of the task, e.g. { min_terms = 2, max_terms = 3 }."""

    @property
    def label(self) -> str:
        """Its name, or that of its file or task."""
        return self.name or Path(self.path.removeprefix(TASK_PREFIX)).stem

    @property
    def makes_fresh_problems(self) -> bool:
        """True for a task whose problems do not repeat."""
        return self.fresh and self.path.startswith(TASK_PREFIX)


class DataConfig(Section):
    """Prompts to train and evaluate on."""

    train_paths: tuple[InputPath, ...] = ()
    """Rows: .parquet, .jsonl, .json (a list of objects) or .csv files, directories written by `save_to_disk` of datasets, or
    hf://OWNER/NAME of the Hub. Relative: from the recipe's directory."""

    sources: tuple[SourceConfig, ...] = ()
    """Several sources with weights, tables [[data.sources]], instead of train_paths."""

    eval_paths: tuple[InputPath, ...] = ()
    """Held-out data with the same columns and in the same formats. With several files, each has separate metrics under
    its file name, in addition to those over all problems. Empty: a part of the training files is held out."""

    held_out_share: Fraction = 0.1
    """Share of the prompts of train_paths, or of each source with files, that is held out if eval_paths is empty: evaluated and
    never trained, at least 4 and at most 64 prompts, those whose text has the smallest hashes. The same file gives the same
    ones. With fewer than 20 prompts none is held out, and of problems that are made neither. 0: none."""

    columns: ColumnsConfig = ColumnsConfig()
    """Names of the columns. The defaults are those of DAPO-Math-17k."""

    system_prompt: str = ""
    """System message for prompts that have none. "": none."""

    prompt_template: str = "{prompt}"
    """Text of a prompt's last turn, with {prompt} in place of the original turn, e.g.
    "{prompt} End with a line 'Answer: ...'."."""

    template: Template = "chat"
    """chat: the tokenizer's chat template. plain: the unchanged contents of the messages, for models without a
    template."""

    chat_template_options: dict[str, Any] = {}
    """Variables passed to the chat template, e.g. { enable_thinking = false }."""

    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt in tokens; longer ones are dropped and counted."""

    deduplicate: bool = True
    """Keep one of several equal (prompt, answer) rows, and report how many there were."""

    shuffle_seed: Seed = 0
    """Seed of the order of prompts, separate from run.seed so that two runs can share the order."""

    order: FunctionPath = ""
    """User-defined function that orders the prompts of each epoch, as "package.module:function" or
    "path/to/file.py:function": (prompts, epoch) -> every index once; see docs/python.md. "": shuffled."""

    injection: InjectionConfig = InjectionConfig()
    """Harder and easier rewrites of training prompts."""

    max_epochs: NonNegativeInt = 0
    """Passes over the prompts after which the data is exhausted (see rollout.on_exhausted). 0: no limit."""

    @property
    def holds_out(self) -> bool:
        """True if a part of the training files is evaluated instead of eval_paths."""
        has_files = bool(self.train_paths) or any(not source.path.startswith(TASK_PREFIX) for source in self.sources)
        return has_files and not self.eval_paths and self.held_out_share > 0

    @property
    def has_held_out(self) -> bool:
        """True if there are problems to evaluate."""
        return bool(self.eval_paths) or self.holds_out

    def broken_rules(self) -> Iterator[Rule]:
        yield from self._broken_rules_of_sources()
        if self.template == "plain" and self.chat_template_options:
            yield Rule(
                "not data.chat_template_options",
                'leave data.chat_template_options out, or set data.template = "chat"',
                when='data.template == "plain"',
                reason="the plain template is no chat template and takes none",
            )
        if self.injection.when == "visit" and "answer_range" in self.injection.templates:
            yield Rule(
                '"answer_range" not in data.injection.templates',
                'leave answer_range out of data.injection.templates, or set data.injection.when = "filtered"',
                when='data.injection.when == "visit"',
                reason="it is for prompts that were not solved",
            )
        if "{prompt}" not in self.prompt_template:
            yield Rule(
                '"{prompt}" in data.prompt_template',
                "write data.prompt_template with the word prompt in braces, which stands for the text of the row",
            )

    def _broken_rules_of_sources(self) -> Iterator[Rule]:
        if not self.train_paths and not self.sources:
            yield Rule(
                "data.train_paths or data.sources",
                'set data.train_paths = ["train.jsonl"], or tables [[data.sources]]',
                reason="there is nothing to train on",
            )
        if self.train_paths and self.sources:
            yield Rule(
                "not (data.train_paths and data.sources)",
                "leave one of data.sources and data.train_paths out",
                reason="a source is a file with a weight",
            )
        if any(not source.weight > 0 or source.size < 1 for source in self.sources):
            yield Rule(
                "not any(not source.weight > 0 or source.size < 1 for source in data.sources)",
                "give every table of data.sources a weight above 0 and, if it is a task, a size of at least 1",
            )
        if self.order and self.sources:
            yield Rule(
                "not data.sources",
                'set data.order = "", or name all files in data.train_paths',
                when="data.order",
                reason="each of several sources has separate epochs",
            )
        if self.injection.templates and any(source.makes_fresh_problems for source in self.sources):
            yield Rule(
                "not any(source.makes_fresh_problems for source in data.sources)",
                "set fresh = false in the tables of data.sources that name a task, or data.injection.templates = []",
                when="data.injection.templates",
                reason="a problem that is made for one epoch comes once, and has no history and no rewrite",
            )
