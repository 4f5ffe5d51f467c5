"""Prompts of teachers that read more than the policy, such as a solution: the last turn in another text.

A sample carries them as flat numbers: for each of its teachers with a prompt, in their order, the prompt's length and its tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dapo.config.distillation_schema import DistillationConfig, TeacherConfig
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.types import Prompt

_COLUMN = re.compile(r"\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True)
class TeacherPrompts:
    """Renders what teachers read."""

    section: DistillationConfig
    template: PromptTemplate

    def of(self, teacher: TeacherConfig, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids that the teacher reads before a response. ValueError if the prompt lacks a column."""
        if not teacher.prompt:
            return prompt.token_ids
        columns = {**prompt.extra, "answer": prompt.answer, "prompt": prompt.messages[-1]["content"]}
        text = _COLUMN.sub(lambda match: _text(_column(columns, match[1], teacher)), teacher.prompt)
        return self.template.render((*prompt.messages[:-1], {**prompt.messages[-1], "content": text}))

    def numbers(self, prompt: Prompt) -> np.ndarray | None:
        """Return the prompts of its teachers in the trainer's processes as flat numbers, int32; None if all read the policy's."""
        found = [self.of(teacher, prompt) for teacher in self.section.readers_of(prompt.source_name)]
        parts = [number for ids in found for number in (len(ids), *ids)]
        return np.array(parts, np.int32) if parts else None

    def require(self, prompts: Iterable[Prompt], max_tokens: int) -> None:
        """Raise ValueError if a teacher's prompt lacks a column or is longer than `max_tokens`."""
        longest, source = 0, ""
        for prompt in prompts:
            for teacher in self.section.teachers_of(prompt.source_name):
                if teacher.prompt and (length := len(self.of(teacher, prompt))) > longest:
                    longest, source = length, f"the prompt of teacher {teacher.name} for {prompt.messages[-1]['content'][:80]!r}"
        if longest > max_tokens:
            raise ValueError(
                f"distillation.teachers: {source} has {longest} tokens, data.max_prompt_tokens is {max_tokens}: set it to at least "
                f"{longest}, or shorten the column"
            )


def _column(columns: Mapping[str, Any], path: str, teacher: TeacherConfig) -> Any:
    value: Any = columns
    for name in (path,) if path in columns else path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(
                f"distillation.teachers: the prompt of {teacher.name} names {{{path}}}, but a row has only "
                f"{', '.join(sorted(columns))}: correct it, or add the column"
            )
        value = value[name]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def split_prompts(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Return the prompts in flat numbers."""
    found, start = [], 0
    while start < len(numbers):
        end = start + 1 + int(numbers[start])
        found.append(numbers[start + 1 : end])
        start = end
    return found
