"""Clarity that is measured: docstrings that start with a verb or a noun, the words of the field, one meaning a class name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import megatron_dapo

PACKAGE = Path(megatron_dapo.__file__).parent

# First words of a subordinate clause or a prepositional phrase: "What is left", "Of the critic", "Whether it fits".
CLAUSE_FRAGMENT = re.compile(
    r"\s*(What|Whether|Of|Where|Who|Whose|Which|Nothing|Nobody|Somebody|Why|How|As|From|With|So|That|For)\b"
)
# Home-made words and the field's word for each (docs/glossary.md). Patterns match whole words, in any case.
COINED = {
    r"(re)?deliver(y|ies|ed|s|ing)?": "weight sync, transfer",
    r"folders?": "directory",
    r"masters": "main params",
    r"resting": "asleep, offloaded",
    r"goes on|go on": "continue, resume",
    r"asked for": "requested",
    r"nobody|whoever": "name the actor",
    r"couriers?|rosters?|fleets?|dialects?": "dispatcher, registry, engines, API version",
    r"trainees?": "learner",
    r"\w*(quantis|normalis|initialis)\w*": "American spelling",
}
MAX_FRAGMENT_SHARE = 0.03
MAX_COINED_WORDS = 10


@cache
def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def definitions() -> list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (name, node)
        for name, text in sources().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds)
    ]


def test_docstrings_start_with_a_verb_or_a_noun_phrase() -> None:
    documented = [(name, doc) for name, node in definitions() if (doc := ast.get_docstring(node))]
    fragments = [f"{name}: {doc.splitlines()[0][:80]}" for name, doc in documented if CLAUSE_FRAGMENT.match(doc)]
    assert len(fragments) <= MAX_FRAGMENT_SHARE * len(documented), "\n".join(fragments)


def test_words_are_those_of_the_field() -> None:
    pattern = re.compile(rf"\b({'|'.join(COINED)})\b", re.IGNORECASE)
    words = [f"{name}: {match.group()}" for name, text in sources().items() for match in pattern.finditer(text)]
    assert len(words) <= MAX_COINED_WORDS, "\n".join(words)


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name for _, node in definitions() if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]
