"""A calculator as a tool, for a model whose chat template knows no tools."""

from __future__ import annotations

from megatron_dapo.environments import ToolEnvironment, tool, user
from megatron_dapo.environments.tools import calculate

SYSTEM = (
    "You have a calculator. Write one line 'calc: EXPRESSION' to use it. After its result, reply with one line "
    "'Answer: RESULT'."
)


class Calculator(ToolEnvironment):
    """Rows have a question and its answer. An example shows the form, which a small model cannot do without."""

    result_role = "user"
    result_format = "result: {result}"

    @tool
    def calc(self, expression: str) -> str:
        """Compute the value of an arithmetic expression."""
        return calculate(expression)

    def reset(self, task, seed):
        said = ("calc: 23 * 47", "Answer: 1081")
        call, answer = ({"role": "assistant", "content": text} for text in said)
        shown = [user("What is 23 * 47?"), call, user("result: 1081"), answer]
        return [{"role": "system", "content": SYSTEM}, *shown, user(task.prompt)]

    def finish(self, turn):
        return turn.text.strip() == f"Answer: {self.task['answer']}"
