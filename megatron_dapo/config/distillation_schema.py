"""The section of distillation: teachers, the divergence of the policy from them, and the prompts that they teach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from megatron_dapo.config.section import Bounds, PositiveFloat, Rule, Section


class TeacherConfig(Section):
    """One teacher, a table [[distillation.teachers]]: a frozen model in the trainer's processes or, with a url, a server."""

    name: str = "teacher"
    """Label in metrics and logs."""

    path: str = ""
    """Hugging Face directory of a model with the policy's tokenizer, of any size that the policy's layout divides. Relative:
    from the recipe's directory. "": model.path, the policy as it starts (self-distillation). With a url: the directory whose
    tokenizer is compared, or ""."""

    url: str = ""
    """Address of a stock SGLang server, http://host:port. It gives the log-probs of the sampled tokens, and the policy learns
    from them by an advantage for each token instead of a divergence over the vocabulary."""

    prompt: str = ""
    """Text of a prompt's last turn as the teacher reads it, with {prompt} in place of what the policy reads and {answer} or
    another column of the row in place of what only the teacher knows, e.g. "{prompt}\n\nA solution: {solution}". Its longest
    prompt fits into data.max_prompt_tokens. "": the policy's prompt."""

    sources: tuple[str, ...] = ()
    """Data sources whose prompts it teaches: names of data.sources, or the rows' own data_source. Empty: all prompts."""

    weight: float = 1.0
    """Factor of distillation.coefficient for this teacher; above 0."""

    refresh_steps: int = 0
    """Train steps after which the teacher takes the policy's weights, again and again: with n, the teacher is the policy of the
    last step that n divides. Only without path and url. 0: the policy as it starts."""

    rl: bool = False
    """Keep the rewards' advantages for its prompts, in addition to the teacher. Off: the reward of these prompts is only
    recorded, and rollout.filter_groups keeps all their groups."""


class DistillationConfig(Section):
    """On-policy distillation: the policy samples, and at each sampled token learns the teacher's distribution over the whole
    vocabulary, in tiles: docs/distillation.md. Used with algorithm.name = dapo."""

    teachers: tuple[TeacherConfig, ...] = ()
    """Teachers, tables [[distillation.teachers]]. Those in the trainer's processes have the policy's layout and take turns.
    Empty: off."""

    divergence: Literal["reverse", "forward", "js"] = "reverse"
    """Divergence from a teacher in the trainer's processes. reverse: KL(policy || teacher). forward: KL(teacher || policy). js:
    the generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649)."""

    beta: Annotated[float, Bounds(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture of js; towards 0 it behaves as forward, towards 1 as reverse."""

    coefficient: PositiveFloat = 1.0
    """Weight of the divergence in the loss, and of a server's advantages."""

    offload: Literal["none", "all"] = "none"
    """all: the weights of teachers are in host memory while they are not needed, so one teacher at a time is on the device."""

    def broken_rules(self) -> Iterator[Rule]:
        names = [teacher.name for teacher in self.teachers]
        if len(set(names)) < len(names) or not all(_is_label(name) for name in names):
            yield Rule(
                "len({teacher.name for teacher in distillation.teachers}) == len(distillation.teachers)",
                "give every table of distillation.teachers another name of letters, digits, dots, dashes and underscores",
                reason="metrics are listed by it",
            )
        if any(not teacher.weight > 0 for teacher in self.teachers):
            yield Rule(
                "not any(not teacher.weight > 0 for teacher in distillation.teachers)",
                "give every table of distillation.teachers a weight above 0",
            )
        if any(teacher.url and not teacher.url.startswith(("http://", "https://")) for teacher in self.teachers):
            yield Rule(
                'not any(teacher.url and "://" not in teacher.url for teacher in distillation.teachers)',
                "write url as http://host:port in every table of distillation.teachers",
            )

        if any("{prompt}" not in teacher.prompt for teacher in self.readers):
            yield Rule(
                'not any("{prompt}" not in teacher.prompt for teacher in distillation.readers)',
                "write {prompt} in the prompt of every table of distillation.teachers that has one",
                reason="a teacher judges responses to the policy's own prompt",
            )
        if any(teacher.refresh_steps < 0 for teacher in self.teachers):
            yield Rule(
                "not any(teacher.refresh_steps < 0 for teacher in distillation.teachers)",
                "give every table of distillation.teachers a refresh_steps of 0 or more",
            )
        if any(teacher.path or teacher.url for teacher in self.snapshots):
            yield Rule(
                "not any(teacher.path or teacher.url for teacher in distillation.snapshots)",
                "leave path and url out of the tables of distillation.teachers that have refresh_steps, or leave refresh_steps out",
                reason="only a teacher that begins as the policy takes its weights",
            )

    @property
    def models(self) -> tuple[TeacherConfig, ...]:
        """Teachers in the trainer's processes."""
        return tuple(teacher for teacher in self.teachers if not teacher.url)

    @property
    def snapshots(self) -> tuple[TeacherConfig, ...]:
        """Teachers that take the policy's weights again and again."""
        return tuple(teacher for teacher in self.teachers if teacher.refresh_steps > 0)

    @property
    def readers(self) -> tuple[TeacherConfig, ...]:
        """Teachers with a separate prompt."""
        return tuple(teacher for teacher in self.teachers if teacher.prompt)

    def readers_of(self, source: str) -> tuple[TeacherConfig, ...]:
        """Return the teachers in the trainer's processes that read another prompt than the policy for those of a source."""
        return tuple(teacher for teacher in self.teachers_of(source) if teacher.prompt and not teacher.url)

    @property
    def servers(self) -> tuple[TeacherConfig, ...]:
        """Teachers that are servers."""
        return tuple(teacher for teacher in self.teachers if teacher.url)

    def teachers_of(self, source: str) -> tuple[TeacherConfig, ...]:
        """Return the teachers of the prompts of a data source."""
        return tuple(teacher for teacher in self.teachers if not teacher.sources or source in teacher.sources)

    def learns_from_rewards(self, source: str) -> bool:
        """Return False if prompts of `source` have teachers that all take the place of the reward."""
        teachers = self.teachers_of(source)
        return not teachers or any(teacher.rl for teacher in teachers)


def _is_label(name: str) -> bool:
    return bool(name) and all(letter.isalnum() or letter in "._-" for letter in name)
